"""Edges of autograd's graph: what passes there is whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

import distconv as dc
from tests.distconv.layouts import grid_over, normal, raises_everywhere


@pytest.mark.fault(94)
@pytest.mark.ranks(2, 3)
def test_the_gradient_at_an_edge_is_the_tensors(comm: Any) -> None:
    x = dc.scatter(normal(5, 7, 6, 4), grid_over(comm, c=comm.size)).requires_grad_()
    for h in (x * 2, *(x * 2).chunk(2, 1)):
        edge = get_gradient_edge(h)
        assert isinstance(edge, GradientEdge)
        by_edge, by_tensor = (torch.autograd.grad((h**3).sum(), i, retain_graph=True)[0] for i in (edge, h))
        assert by_edge.dist == h.dist
        assert torch.equal(dc.gather(by_edge), dc.gather(by_tensor))


@pytest.mark.ranks(2, 3)
def test_a_seed_at_an_edge_is_the_gradient_of_its_tensor(comm: Any) -> None:
    x, seed = (dc.scatter(normal(5, 3, 7, 4, seed=s), grid_over(comm, h=comm.size)) for s in (0, 1))
    x.requires_grad_()
    y = x * 2
    (by_edge,) = torch.autograd.grad(get_gradient_edge(y), x, seed, retain_graph=True)
    assert torch.equal(dc.gather(by_edge), 2 * normal(5, 3, 7, 4, seed=1))
    torch.autograd.backward(get_gradient_edge(y), dc.gather(seed))
    assert torch.equal(dc.gather(x.grad), 2 * normal(5, 3, 7, 4, seed=1))


@pytest.mark.ranks(2)
def test_a_seed_of_another_shape_than_its_edge_is_refused_alike(comm: Any) -> None:
    x = dc.scatter(normal(5, 3, 6, 4), grid_over(comm, h=comm.size)).requires_grad_()
    edge = get_gradient_edge(x * 2)
    seed = dc.scatter(normal(5, 3, 5, 4), grid_over(comm, h=comm.size))
    match = r"gradient of shape \(5, 3, 5, 4\).*\(5, 3, 6, 4\)"
    raises_everywhere(comm, dc.ShapeError, match, lambda: torch.autograd.grad(edge, x, seed))
    # As many elements are not enough.
    seed = dc.scatter(normal(5, 3, 4, 6), grid_over(comm, h=comm.size))
    match = r"gradient of shape \(5, 3, 4, 6\).*\(5, 3, 6, 4\)"
    raises_everywhere(comm, dc.ShapeError, match, lambda: torch.autograd.grad(edge, x, seed))


def test_plain_edges_and_seeds_are_torchs() -> None:
    x = normal(3).requires_grad_()
    y = x * 2
    edge = get_gradient_edge(y)
    assert type(edge) is GradientEdge
    assert torch.equal(torch.autograd.grad(edge, x, torch.ones(3, dtype=torch.float64))[0], x.new_full((3,), 2.0))
