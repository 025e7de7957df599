"""``x[mask]`` without gathering: values, gradients and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grids, normal, raises_everywhere

SHAPES = [(5, 3, 7, 9), (1, 1, 7, 9), (1, 4, 3, 8), (2, 3, 0, 4)]


def _check_same(whole: torch.Tensor, part: dc.DistTensor, x: torch.Tensor, d: dc.DistTensor) -> None:
    weights = torch.arange(whole.numel(), dtype=torch.float64).reshape(whole.shape)
    (whole * weights).sum().backward()
    (part * weights).sum().backward()
    torch.testing.assert_close(dc.gather(part), whole)
    assert x.grad is not None
    assert d.grad is not None
    torch.testing.assert_close(dc.gather(d.grad), x.grad)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threshold", [-9.0, 0.3, 9.0])
def test_elements_under_a_mask_are_those_of_one_process_in_its_order(comm: Any, shape: Any, threshold: float) -> None:
    for grid in grids(comm, "nch"):
        x = normal(*shape).requires_grad_()
        d = dc.scatter(x.detach(), grid).requires_grad_()
        _check_same(x[x > threshold], d[d > threshold], x, d)
        _check_same(x.masked_select(x > threshold), d.masked_select(d > threshold), x, d)


@pytest.mark.ranks(2, 3, 4)
def test_masks_of_pixels_of_samples_and_of_channels(comm: Any) -> None:
    pixels, keep = normal(5, 7, 9, seed=1) > 0, torch.tensor([True, False, True])
    for grid in grids(comm, "nch"):
        x = normal(5, 3, 7, 9).requires_grad_()
        d = dc.scatter(x.detach(), grid).requires_grad_()
        mask = dc.scatter(pixels, grid, "nhw")
        _check_same(x.permute(0, 2, 3, 1)[pixels], d.permute(0, 2, 3, 1)[mask], x, d)
        _check_same(x.permute(0, 2, 3, 1)[pixels], d.permute(0, 2, 3, 1)[pixels], x, d)
        _check_same(x[pixels[:, 0, 0]], d[mask[:, 0, 0]], x, d)
        _check_same(x[:, keep], d[:, keep], x, d)


@pytest.mark.ranks(2, 3)
def test_a_plain_tensor_under_a_distributed_mask_gets_its_full_gradient(comm: Any) -> None:
    mask = normal(5, 3, 7, 9, seed=1) > 0
    for grid in grids(comm, "nch"):
        x, p = (normal(5, 3, 7, 9).requires_grad_() for _ in range(2))
        (x[mask] ** 2).sum().backward()
        (p[dc.scatter(mask, grid)] ** 2).sum().backward()
        torch.testing.assert_close(p.grad, x.grad)


@pytest.mark.ranks(2, 4)
def test_each_rank_keeps_what_it_has(comm: Any) -> None:
    for grid in grids(comm, "nch"):
        x = normal(8, 8, 8, 8)
        d = dc.scatter(x, grid)
        y = d[d > 0]
        assert y.dist.split[0] is not None
        assert y.local.numel() < y.numel()
        torch.testing.assert_close(dc.gather(y[y < 1].exp()), x[(x > 0) & (x < 1)].exp())


@pytest.mark.ranks(2)
def test_a_mask_among_other_indices_is_named(comm: Any) -> None:
    d = dc.scatter(normal(5, 3, 7, 9), grids(comm, "h")[0])
    match = "a mask and other indices"
    raises_everywhere(comm, dc.UnsupportedOperation, match, lambda: d[torch.ones(5).bool(), 1])
