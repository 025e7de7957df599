"""The reference models: their structure, and logits of the input's size for any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.layers.models import MODELS, UNet, mesh1k, mesh2k

SIZES = [(64, 64), (50, 36), (17, 23)]


@pytest.mark.parametrize(("factory", "layers"), [(mesh1k, 3), (mesh2k, 5)])
def test_the_mesh_models_are_six_blocks_that_halve_the_resolution_first(factory: Any, layers: int) -> None:
    model = factory(width=4)
    assert len(model.blocks) == 6
    for block in model.blocks:
        convolutions = [m for m in block if isinstance(m, nn.Conv2d)]
        assert [c.stride for c in convolutions] == [(2, 2), *[(1, 1)] * (layers - 1)]
        assert all(c.kernel_size == (3, 3) and c.padding == (1, 1) for c in convolutions)
        assert [type(m) for m in block] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU] * layers
    assert model.blocks(torch.zeros(2, 18, 128, 64)).shape == (2, 4, 2, 1)


def test_the_mesh_models_have_the_widths_that_give_the_papers_times() -> None:
    with torch.device("meta"):
        assert mesh1k().blocks[5][0].weight.shape == (304, 304, 3, 3)
        assert mesh2k().blocks[5][0].weight.shape == (128, 128, 3, 3)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("size", SIZES)
def test_logits_have_the_size_of_the_input(name: str, size: tuple[int, int]) -> None:
    model = MODELS[name](width=2, classes=3)
    assert model(torch.zeros(2, 18, *size)).shape == (2, 3, *size)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_unet_doubles_its_width_with_each_level(depth: int) -> None:
    model = UNet(in_channels=5, classes=2, width=3, depth=depth)
    assert [block[0].out_channels for block in model.down] == [3 << level for level in range(depth + 1)]
    assert [block[0].in_channels for block in model.up] == [3 * (3 << level) for level in reversed(range(depth))]
    assert model(torch.zeros(1, 5, 37, 29)).shape == (1, 2, 37, 29)


GRIDS = {1: ["n=1"], 2: ["h=2"], 3: ["h=3"], 4: ["h=2,w=2", "n=2,w=2"], 6: ["n=2,h=3"], 8: ["n=2,h=2,w=2"]}


@pytest.mark.ranks(*GRIDS)
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("size", SIZES)
def test_a_model_over_ranks_equals_one_process(comm: Any, name: str, size: tuple[int, int]) -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 18, *size, dtype=torch.float64)
    target = (torch.rand(2, *size, dtype=torch.float64) > 0.8).double()
    plain, distributed = (_seeded(name) for _ in range(2))
    expected = F.binary_cross_entropy_with_logits(plain(x).squeeze(1), target)
    expected.backward()
    for text in GRIDS[comm.size]:
        grid = dc.ProcessGrid(comm, **dc.parse_grid(text))
        distributed = dc.parallelize(_seeded(name), grid)
        y = distributed(dc.scatter(x, grid)).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(y, dc.scatter(target, grid, dims="nhw"))
        loss.backward()
        assert abs(loss.item() - expected.item()) <= 1e-12 * abs(expected.item())
        for (key, parameter), other in zip(distributed.named_parameters(), plain.parameters(), strict=True):
            scale = other.grad.abs().max().clamp_min(1e-6)
            assert (parameter.grad - other.grad).abs().max() <= 1e-8 * scale, key


def _seeded(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name](width=3).double()
