"""Norms and similarities, against one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import same_as_one_process
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)

VECTORS = {
    "vector_norm of order -inf": lambda x: torch.linalg.vector_norm(x, -math.inf, 1),
    "vector_norm of order 3.5": lambda x: torch.linalg.vector_norm(x, 3.5, 2, True),
    "vector_norm of order -2.1": lambda x: torch.linalg.vector_norm(x[:, :, :2], -2.1, 2, True),
    "vector_norm of order inf": lambda x: torch.linalg.vector_norm(x.round(), math.inf, (1, 2)),
    "vector_norm of order 0": lambda x: torch.linalg.vector_norm(x.relu(), 0, 1),
    "vector_norm in another dtype": lambda x: torch.linalg.vector_norm(x.float(), 2, (1, 2), dtype=torch.float64),
    "norm": lambda x: x.norm(),
    "dist": lambda x: torch.dist(x, x[:1] * 2) + torch.dist(x, x.square(), 1),
    "normalize": lambda x: F.normalize(x) + F.normalize(x, p=1, dim=2),
    "cosine_similarity by broadcasting": lambda x: F.cosine_similarity(x, x[:, :1], 2),
    "cosine_similarity with nothing": lambda x: F.cosine_similarity(x, x * 0, 1),
}


@pytest.mark.parametrize("name", VECTORS)
@UP_TO_FOUR_RANKS
def test_vectors_equal_one_process(comm, name):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, VECTORS[name], normal(*SHAPE))


@pytest.mark.parametrize("order", [1, 2, 3, math.inf])
def test_the_norm_of_zeros_has_torchs_gradient(comm, order):
    zeros = torch.zeros(SHAPE, dtype=torch.float64)
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, lambda x: torch.linalg.vector_norm(x, order, (1, 2)), zeros)
        same_as_one_process(dist, lambda x: torch.linalg.vector_norm(x, order), zeros)


@pytest.mark.ranks(at_least=2)
def test_norms_of_one_split_matrix_name_a_fix(comm):
    x = dc.scatter(normal(6, 6), grid_over(comm, c=comm.size))
    for call in (lambda: x.norm("nuc"), lambda: torch.linalg.norm(x, 2), lambda: torch.linalg.matrix_norm(x, 2)):
        raises_everywhere(comm, dc.UnsupportedOperation, "gather", call)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("points", "p"), [(4, 2.0), (30, 2.0), (4, 1.0)])
def test_distances_of_all_pairs(comm: Any, points: int, p: float) -> None:
    for grid in grids(comm, "nch"):
        x, c = normal(5, 3, 7, 9).requires_grad_(), normal(points, 3, seed=1).requires_grad_()
        d, e = dc.scatter(x.detach(), grid).requires_grad_(), c.detach().clone().requires_grad_()
        found = []
        for given, centres in ((x, c), (d, e)):
            found.append(torch.cdist(given.flatten(2).transpose(1, 2), centres, p=p))
            (found[-1] ** 2).sum().backward()
        torch.testing.assert_close(dc.gather(found[1]), found[0])
        torch.testing.assert_close(e.grad, c.grad)
        torch.testing.assert_close(dc.gather(d.grad), x.grad)
