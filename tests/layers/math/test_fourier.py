"""Fourier transforms of split dimensions, against one process."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from distconv.communication.transport import count_traffic
from tests.distconv.layouts import grid_over, normal
from tests.layers.compare import same_as_one_process
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)
FFT = torch.fft


def real(y):
    """Real and imaginary parts of complex numbers."""
    return torch.stack([y.real, y.imag])


TRANSFORMS = {
    "fft2": lambda x: real(FFT.fft2(x)),
    "rfft2 and irfft2": lambda x: FFT.irfft2(FFT.rfft2(x) * 2, s=x.shape[-2:]),
    "rfftn and irfftn": lambda x: FFT.irfftn(FFT.rfftn(x), s=x.shape),
    "hfft2 and ihfft2": lambda x: FFT.hfft2(FFT.ihfft2(x), s=x.shape[-2:]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@UP_TO_FOUR_RANKS
def test_a_transform_equals_one_process(comm, name):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, TRANSFORMS[name], normal(*SHAPE))


@pytest.mark.parametrize("name", ["fft2", "rfft2 and irfft2", "rfftn and irfftn", "hfft2 and ihfft2"])
@pytest.mark.ranks(4)
def test_one_sample_of_one_channel_is_transformed_line_by_line(comm, name):
    same_as_one_process(grid_over(comm, h=2, w=2), TRANSFORMS[name], normal(1, 1, 7, 5))


@pytest.mark.ranks(at_least=2, at_most=4)
def test_each_rank_transforms_its_part_of_the_lines(comm, monkeypatch):
    x = dc.scatter(normal(2, 6, 8, 4), grid_over(comm, h=comm.size))
    sizes = []
    FFT.rfft2(x)  # asks torch for the shape of the result, once
    with torch.profiler.profile(record_shapes=True) as seen:
        found = FFT.rfft2(x)
    for event in seen.events():
        if event.name == "aten::_fft_r2c":
            sizes.append(torch.Size(event.input_shapes[0]).numel())
    assert comm.allreduce(sum(sizes)) == x.numel()
    assert found.dist.split == (None, "h", None, None)


@pytest.mark.ranks(at_least=2, at_most=4)
def test_a_transform_and_its_inverse_move_a_tensor_there_and_home(comm):
    others = comm.size - 1
    for axes, dims in ((dict(h=comm.size), (2, 3)), (dict(w=comm.size), (2, 3)), (dict(h=comm.size), (1, 2))):
        grid = grid_over(comm, **axes)
        x = dc.scatter(normal(2, 12, 12, 12), grid, dims="nchw" if dims == (2, 3) else "nhwc")
        with count_traffic() as traffic:
            spectrum = FFT.rfft2(x, dim=dims)
        assert comm.allreduce(sum(traffic.sent.values())) == x.numel() * 8 * others // comm.size
        with count_traffic() as traffic:
            restored = FFT.irfft2(spectrum * 2, dim=dims)
        assert restored.dist == x.dist
        assert comm.allreduce(sum(traffic.sent.values())) == x.numel() * 8 * others // comm.size


@pytest.mark.ranks(at_most=4)
def test_a_spectral_convolution_equals_one_process(comm):
    weight = torch.complex(normal(4, 6, 3, 2, seed=1), normal(4, 6, 3, 2, seed=2))

    def convolved(x):
        spectrum = FFT.rfft2(x)
        low = torch.einsum("ncxy,coxy->noxy", spectrum[:, :, :3, :2], weight)
        out = torch.zeros(3, 6, 7, 3, dtype=weight.dtype)
        if isinstance(x, dc.DistTensor):
            out = dc.scatter(out, x.grid)
        out[:, :, :3, :2] = low
        return FFT.irfft2(out, s=(7, 5))

    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, convolved, normal(*SHAPE))
