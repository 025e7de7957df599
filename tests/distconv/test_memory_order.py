"""Random numbers of permuted, sliced and channels_last tensors are those of one process, and so are strides."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal
from tests.layers.compare import built, same_as_one_process

SHAPE = (4, 4, 6, 5)

RANKS = pytest.mark.ranks(2, 3)

LAST = torch.channels_last


def tokens(x):
    return x.flatten(2).transpose(1, 2)


def attended(x):
    t = tokens(x)
    return ((t @ t.mT).softmax(-1) @ t).transpose(1, 2).unflatten(2, x.shape[2:])


CONVOLUTION = built(lambda: nn.Conv2d(4, 4, 3, padding=1))
LINEAR = built(lambda: nn.Linear(4, 4))

MADE = {
    "as it is": lambda x: x,
    "tokens": tokens,
    "linear of tokens": lambda x: LINEAR(tokens(x)),
    "convolution after attention": lambda x: CONVOLUTION(attended(x)),
    "channels last": lambda x: x.to(memory_format=LAST) * 2,
    "convolution of channels last": lambda x: CONVOLUTION(x.contiguous(memory_format=LAST)).relu(),
    "normed channels last": lambda x: F.group_norm(
        F.batch_norm(x.to(memory_format=LAST), None, None, None, None, True), 2
    ),
    "made contiguous": lambda x: x.permute(0, 2, 3, 1).contiguous(),
    "reflected channels last": lambda x: F.pad(x.to(memory_format=LAST), (1, 1, 1, 1), "reflect"),
    "pixels of channels last": lambda x: F.pixel_shuffle(torch.cat([x, x], 1).to(memory_format=LAST), 2),
    "channels last by a list": lambda x: x.to(memory_format=LAST)[[1, 0]],
    "joined": lambda x: torch.cat([x.to(memory_format=LAST)] * 2, 1),
    "some channels": lambda x: x[:, 1:3],
    "repeated": lambda x: x[:, :1].expand(SHAPE),
    "einsum": lambda x: torch.einsum("nchw,dc->ndhw", x, LINEAR.weight),
    "mixed": lambda x: x + x.to(memory_format=LAST),
}

DRAWN = [
    lambda x: F.dropout(x, 0.4),
    lambda x: F.dropout(x * 1, 0.4, inplace=True),
    lambda x: F.alpha_dropout(x, 0.4, True),
    lambda x: torch.randn_like(x) + x,
    lambda x: torch.bernoulli(x.detach().sigmoid()) * x,
    lambda x: x.clone().detach().uniform_() * x,
    lambda x: F.rrelu(x, training=True),
]


VOLUMES = {
    "kernel of 3": lambda x, w: F.conv3d(x, w, padding=1),
    "kernel of 1": lambda x, w: F.conv3d(x, w[..., :1, :1, :1]),
    "same": lambda x, w: F.conv3d(x, w, padding="same"),
    "dilated": lambda x, w: torch.conv3d(x, w, None, (1, 1, 1), [2, 2, 2], dilation=2),
    "transposed": lambda x, w: F.conv_transpose3d(x, w, None, 2, output_padding=1),
    "weight channels last": lambda x, w: F.conv3d(x.contiguous(), w.to(memory_format=torch.channels_last_3d)),
}


@pytest.mark.parametrize("call", VOLUMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("samples", [1, 3])
@RANKS
@pytest.mark.cpu
def test_strides_of_volumes_are_those_of_the_kernel_that_torch_chooses(comm, call, dtype, samples):
    x = normal(samples, 4, 5, 6, 7).to(dtype).contiguous(memory_format=torch.channels_last_3d)
    weight = normal(4, 4, 3, 3, 3).to(dtype)
    expected = VOLUMES[call](x, weight)
    for grid in grids(comm, "nhc"):
        found = VOLUMES[call](dc.scatter(x, grid), weight)
        assert found.stride() == expected.stride()
        torch.manual_seed(3)
        dropped = F.dropout(expected, 0.4)
        torch.manual_seed(3)
        torch.testing.assert_close(dc.gather(F.dropout(found, 0.4)), dropped, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", MADE)
@RANKS
def test_strides_and_draws_are_those_of_one_process(comm, make):
    expected = MADE[make](normal(*SHAPE))
    for grid in grids(comm, "nhc"):
        assert MADE[make](dc.scatter(normal(*SHAPE), grid)).stride() == expected.stride()

    def run(draw, x):
        torch.manual_seed(3)
        return draw(MADE[make](x)) + torch.rand((), dtype=torch.float64)

    for axis, draw in zip("nhwchwn", DRAWN, strict=True):
        same_as_one_process(grid_over(comm, **{axis: comm.size}), lambda x, draw=draw: run(draw, x), normal(*SHAPE))


@pytest.mark.ranks(2, 3, 4)
def test_a_slice_of_blocks_of_one_row_is_drawn_as_in_one_process(comm):
    expected = normal(2, 3, comm.size, 4)
    torch.manual_seed(3)
    expected.permute(0, 2, 3, 1)[:, :, 1:].normal_()
    x = dc.scatter(normal(2, 3, comm.size, 4), grid_over(comm, h=comm.size))
    torch.manual_seed(3)
    x.permute(0, 2, 3, 1)[:, :, 1:].normal_()
    assert torch.equal(dc.gather(x), expected)


@RANKS
def test_contiguous_copies_where_one_process_copies_and_only_there(comm):
    for grid in grids(comm, "nhc"):
        x = dc.scatter(normal(comm.size, 1, comm.size, 1), grid)
        turned = x.transpose(0, 2)
        assert x.contiguous() is x
        copy = turned.contiguous()
        copy.zero_()
        assert torch.equal(dc.gather(x), normal(comm.size, 1, comm.size, 1))
        copy = turned.reshape(-1)
        copy.zero_()
        assert torch.equal(dc.gather(x), normal(comm.size, 1, comm.size, 1))


@pytest.mark.usefixtures("fallback")
@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
@RANKS
def test_what_a_mask_picks_of_a_permuted_tensor_has_the_strides_of_one_process(comm):
    whole, mask = normal(*SHAPE), normal(SHAPE[0], *SHAPE[2:], seed=1) > 0
    expected = whole.permute(0, 2, 3, 1)[mask]
    for grid in grids(comm, "nhc"):
        found = dc.scatter(whole, grid).permute(0, 2, 3, 1)[dc.scatter(mask, grid, dims="nhw")]
        assert found.stride() == expected.stride()
        assert torch.equal(dc.gather(found.abs()), expected.abs())


@RANKS
def test_one_pixel_of_a_channels_last_image_stays_channels_last(comm):
    """Its strides alone tell interpolation the format; blocks of the result must have it, too."""
    image = normal(4, 4, 6, 8).contiguous(memory_format=LAST)
    for grid in grids(comm, "nhw"):
        x = dc.scatter(image, grid)
        for found, expected in (
            (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(image, 1)),
            (pyramid(x), pyramid(image)),
            (unpooled(x), unpooled(image)),
        ):
            assert found.stride() == expected.stride()
            assert found.local.is_contiguous(memory_format=LAST)


def pyramid(x):
    return torch.cat([x, F.interpolate(F.adaptive_avg_pool2d(x, 1), size=x.shape[2:], mode="bilinear")], 1)


def unpooled(x):
    return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)
