"""Pooling layers against torch's on volumes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.layers.sparse import (
    SparseAvgPool,
    SparseGlobalPool,
    SparseMaxPool,
    SparseSumPool,
    SparseTensor,
    from_dense,
    to_dense,
)
from tests.layers.sparse.clouds import normal

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
WINDOWS = [(2, None, 0), (3, 2, 1), (3, 1, 1), (2, 3, 0), (3, None, 0)]


def volume_and_sites(dimension, seed=0):
    """A volume of extent 12 that is empty but at 30% of its cells; a sample is empty."""
    active = torch.rand(3, *[12] * dimension, generator=torch.Generator().manual_seed(seed)) < 0.3
    active[1] = False
    return normal(3, 2, *[12] * dimension, seed=seed).requires_grad_(), active


def dense_pool(kind, volume, active, window):
    kernel, stride, padding = window
    options = {"stride": stride, "padding": padding}
    dimension = volume.ndim - 2
    mask = active[:, None].to(volume.dtype)
    if kind is SparseMaxPool:
        y = MAX[dimension](volume.masked_fill(~active[:, None], float("-inf")), kernel, **options)
        return torch.where(y.isinf(), 0, y)
    total = AVERAGE[dimension](volume * mask, kernel, **options) * kernel**dimension
    if kind is SparseSumPool:
        return total
    return total / (AVERAGE[dimension](mask, kernel, **options) * kernel**dimension).round().clamp(min=1)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dimension", [1, 2, 3])
@pytest.mark.parametrize("kind", [SparseMaxPool, SparseAvgPool, SparseSumPool])
def test_pooling_equals_pooling_of_a_volume_at_its_sites(kind, dimension, window):
    volume, active = volume_and_sites(dimension)
    x = from_dense(volume, active=active)
    kernel, stride, padding = window
    y = kind(kernel, stride, dimension, padding=padding)(x)
    cells = dense_pool(kind, volume, active, window)
    expected = cells.movedim(1, -1)[(y.coords[:, 0], *(y.coords[:, 1:] // y.stride).unbind(1))]
    torch.testing.assert_close(y.features, expected, rtol=1e-12, atol=1e-12)
    direction = normal(*y.shape, seed=5)
    a, b = (torch.autograd.grad(out, volume, direction)[0] for out in (y.features, expected))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), [(3, 2, 1, 1), ((3, 2), (1, 3), (1, 0), (2, 3))])
def test_all_windows_within_borders_are_torchs_max_pooling(kernel, stride, padding, dilation):
    volume, active = volume_and_sites(2)
    x = from_dense(volume, active=active).with_spatial_shape(12)
    y = SparseMaxPool(kernel, stride, 2, padding=padding, dilation=dilation, all_windows=True)(x)
    lowest = volume.masked_fill(~active[:, None], float("-inf"))
    expected = F.max_pool2d(lowest, kernel, stride, padding, dilation)
    found = to_dense(y)
    assert y.spatial_shape == expected.shape[2:]
    assert len(y.coords) == (~expected.isinf()).any(1).sum()
    torch.testing.assert_close(found, torch.where(expected.isinf(), 0, expected), rtol=1e-12, atol=1e-12)
    direction = normal(*found.shape, seed=5)
    a, b = (torch.autograd.grad(out, volume, direction * ~expected.isinf())[0] for out in (found, expected))
    torch.testing.assert_close(a, b * active[:, None], rtol=1e-12, atol=1e-12)


def test_windows_may_differ_by_dimension_and_have_four():
    coords = torch.tensor([[0, 0, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 1]])
    x = SparseTensor(coords, torch.tensor([[1.0], [2.0], [3.0]]))
    assert SparseSumPool((2, 2, 1, 1), 2, 4)(x).features.tolist() == [[3.0]]


def test_the_size_of_a_volume_stays_through_pooling():
    volume, active = volume_and_sites(2)
    y = SparseMaxPool(2, dimension=2)(from_dense(volume, active=active))
    assert to_dense(y, (6, 6)).shape == (3, 2, 6, 6)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SparseMaxPool((2, 2)), r"kernel_size=\(2, 2\): .* one for each of 3 dimensions"),
        (lambda: SparseMaxPool(0, 1), "kernel_size=0"),
        (lambda: SparseMaxPool(2, padding=-1), "padding=-1: pass an integer of at least 0"),
        (lambda: SparseAvgPool(2, stride=-2), "stride=-2"),
        (lambda: SparseAvgPool(2, dilation=0), "dilation=0"),
        (lambda: SparseGlobalPool("mean"), "mode='mean': choose one of avg, max, sum"),
    ],
)
def test_invalid_options_of_a_layer_raise(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_plain_tensors_raise():
    for layer in (SparseMaxPool(2), SparseGlobalPool()):
        with pytest.raises(dc.UnsupportedOperation, match="not Tensor"):
            layer(torch.zeros(2, 3))
