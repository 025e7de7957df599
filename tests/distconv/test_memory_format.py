"""Blocks of channels-last tensors: their memory format after layers, in gradients, and after communication."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.memory_format import convert_weights, dense, memory_format, named_format, new_empty
from tests.distconv.layouts import grids, normal
from tests.layers.compare import built, close, whole

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

LAYERS = {
    "conv": lambda: nn.Conv2d(8, 8, 3, padding=1),
    "conv, depthwise": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
    "conv, transposed": lambda: nn.ConvTranspose2d(8, 8, 2, stride=2),
    "batch norm": lambda: nn.BatchNorm2d(8),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "max pool with halo": lambda: nn.MaxPool2d(3, 2, 1),
    "max pool, 3-D": lambda: nn.MaxPool3d(2),
    "adaptive pool": lambda: nn.AdaptiveAvgPool2d((5, 4)),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "reflection": lambda: nn.ReflectionPad2d(1),
    "dropout": lambda: nn.Dropout(0.5),
    "skip connection": lambda: _Joined(),
}
KEEP_GRADIENTS = set(LAYERS) - {"adaptive pool", "reflection", "group norm"}
"""Layers whose gradient of the input is channels-last, too; the others are computed by kernels of contiguous blocks."""


class _Joined(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x.relu()], 1)


def blocks_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format of the block, or of a plain tensor."""
    return memory_format(tensor.local if isinstance(tensor, dc.DistTensor) else tensor)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", LAYERS)
def test_blocks_have_the_memory_format_of_one_process(comm, name):
    layer = built(LAYERS[name])
    shape = (4, 8, 13, 11) if "3-D" not in name else (4, 8, 7, 9, 6)
    last = LAST[len(shape)]
    x = normal(*shape).contiguous(memory_format=last).requires_grad_()
    y = layer.to(memory_format=last)(x)
    assert memory_format(y) is last
    gradient = normal(*y.shape, seed=3).contiguous(memory_format=last)
    y.backward(gradient)
    for grid in grids(comm, "nhw"):
        split = dc.scatter(x.detach(), grid).requires_grad_()
        assert blocks_format(split) is last
        found = dc.parallelize(copy.deepcopy(layer), grid)(split)
        assert blocks_format(found) is last or not found.local.numel(), grid
        found.backward(dc.scatter(gradient, found.dist))
        if name in KEEP_GRADIENTS:
            assert blocks_format(split.grad) is last, grid
        if name != "dropout":
            close(whole(found), y.detach(), f"y on {grid}")
            close(whole(split.grad), x.grad, f"dL/dx on {grid}")


@pytest.mark.ranks(2, 3, 4)
def test_redistribution_keeps_the_memory_format(comm):
    x = normal(4, 6, 7, 5).contiguous(memory_format=torch.channels_last)
    for source in grids(comm, "nh"):
        for target in grids(comm, "hw"):
            split = dc.scatter(x, source).requires_grad_()
            moved = split.redistribute(target)
            assert blocks_format(moved) is torch.channels_last
            assert torch.equal(dc.gather(moved), x)
            moved.backward(dc.scatter(x, target))
            assert blocks_format(split.grad) is torch.channels_last
            assert torch.equal(whole(split.grad), x)


@pytest.mark.ranks(2)
def test_a_block_is_converted_where_an_operator_makes_another_format(comm):
    grid = grids(comm, "h")[0]
    x = normal(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    rolled = dc.scatter(x, grid).roll(2, 2)
    assert blocks_format(rolled) is torch.channels_last
    assert torch.equal(dc.gather(rolled), x.roll(2, 2))


def test_formats_of_views_and_of_what_is_contiguous_in_both():
    x = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert memory_format(x[:, :, 1:3]) is torch.channels_last
    assert (
        memory_format(torch.zeros(2, 1, 4, 5).contiguous(memory_format=torch.channels_last)) is torch.contiguous_format
    )
    assert memory_format(torch.zeros(2, 3).T) is torch.contiguous_format
    expanded = dense(torch.ones(()).expand(2, 3, 4, 5))
    assert expanded.is_contiguous() and expanded.stride() == (60, 20, 5, 1)
    view = x[:, :, 1:3]
    assert dense(x) is x and dense(view).is_contiguous(memory_format=torch.channels_last)
    empty = new_empty(view.double(), (1, 2, 3, 4))
    assert empty.shape == (1, 2, 3, 4) and empty.dtype is torch.float64
    assert memory_format(empty) is torch.channels_last


@pytest.mark.parametrize(
    ("name", "dims", "expected"),
    [
        ("contiguous", 4, torch.contiguous_format),
        ("channels_last", 3, torch.contiguous_format),
        ("channels_last", 4, torch.channels_last),
        ("channels_last", 5, torch.channels_last_3d),
    ],
)
def test_formats_by_number_of_dimensions(name: str, dims: int, expected: torch.memory_format) -> None:
    assert named_format(name, dims) is expected


def test_weights_of_two_and_of_three_dimensions_are_converted() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv3d(2, 2, 3), nn.Linear(2, 2))
    values = [weight.detach().clone() for weight in model.parameters()]
    convert_weights(model, "channels_last")
    for weight, before in zip(model.parameters(), values, strict=True):
        assert torch.equal(weight, before)
        assert weight.is_contiguous(memory_format=named_format("channels_last", weight.dim()))
