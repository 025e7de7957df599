"""Embeddings of distributed indices, against one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.communication.transport import count_traffic
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import close, same_as_one_process

ROWS = 11


def indices(*shape, seed=1):
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(seed))


LOOKUPS = {
    "embedding": lambda i, w: F.embedding(i, w),
    "embedding with a padding row": lambda i, w: F.embedding(i, w, padding_idx=3),
    "embedding with a negative padding row": lambda i, w: F.embedding(i, w, padding_idx=-2),
    "gradients by frequency": lambda i, w: F.embedding(i, w, scale_grad_by_freq=True),
    "gradients by frequency, padded": lambda i, w: F.embedding(i, w, padding_idx=3, scale_grad_by_freq=True),
    "rows of a largest norm": lambda i, w: F.embedding(i, w, max_norm=1.5),
    "rows of a largest 1-norm": lambda i, w: F.embedding(i, w, max_norm=1.5, norm_type=1.0),
    "bags by mean": lambda i, w: F.embedding_bag(i, w),
    "bags by sum, padded": lambda i, w: F.embedding_bag(i, w, mode="sum", padding_idx=3),
    "bags by maximum": lambda i, w: F.embedding_bag(i, w, mode="max"),
    "bags of a largest norm": lambda i, w: F.embedding_bag(i, w, max_norm=1.5),
}


@pytest.mark.filterwarnings("error::distconv.ReplicationWarning")
@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("samples", [7, 2, 1])
def test_a_lookup_equals_one_process(comm, name, samples):
    for grid in grids(comm, "nw"):
        same_as_one_process(grid, LOOKUPS[name], indices(samples, 6), plain=[normal(ROWS, 5)], dims=["nw"])


@pytest.mark.filterwarnings("error::distconv.ReplicationWarning")
@pytest.mark.ranks(2, 3)
def test_bags_with_weights_equal_one_process(comm):
    def bags(i, weights, table):
        return F.embedding_bag(i, table, mode="sum", per_sample_weights=weights)

    for grid in grids(comm, "nw"):
        same_as_one_process(grid, bags, indices(7, 6), normal(7, 6, seed=2), plain=[normal(ROWS, 5)], dims=["nw", "nw"])


@pytest.mark.ranks(2, 3)
def test_indices_of_any_layout_are_looked_up(comm):
    grid = grid_over(comm, n=comm.size)
    for options in ({"boundaries": {"n": (0, 0, *(7,) * (comm.size - 1))}}, {"cyclic": {"n": 1}}):
        dist = dc.Distribution(grid, ("n", None), **options)
        found = same_as_one_process(dist, LOOKUPS["embedding"], indices(7, 6), plain=[normal(ROWS, 5)])
        assert found.dist == dist.with_axes(("n", None, None))


@pytest.mark.ranks(2, 4)
def test_an_embedding_stays_split_and_sends_nothing_but_its_gradient(comm):
    torch.manual_seed(1)
    model = nn.Embedding(ROWS, 5).double()
    split = dc.parallelize(copy.deepcopy(model), grid_over(comm, n=comm.size))
    i = indices(8, 6)
    given = dc.scatter(i, grid_over(comm, n=comm.size), dims="n-")
    with count_traffic() as traffic:
        found = split(given)
    assert found.dist.axes == ("n", None, None) and not traffic.sent
    found.square().sum().backward()
    model(i).square().sum().backward()
    close(split.weight.grad, model.weight.grad, "dL/dw")


@pytest.mark.ranks(2)
def test_a_captured_step_looks_up_other_indices_and_counts_them(comm):
    grid, table = grid_over(comm, n=comm.size), normal(ROWS, 5).requires_grad_()

    def step(i):
        table.grad = None
        F.embedding(i, table, scale_grad_by_freq=True).square().sum().backward()

    replay = dc.capture(step, dc.scatter(indices(7, 6), grid, dims="n-"))
    for seed in (2, 3, 4):
        i, expected = indices(7, 6, seed=seed), normal(ROWS, 5).requires_grad_()
        replay(dc.scatter(i, grid, dims="n-"))
        F.embedding(i, expected, scale_grad_by_freq=True).square().sum().backward()
        close(table.grad, expected.grad, f"gradient of step {seed}")


@pytest.mark.usefixtures("fallback")
@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
@pytest.mark.ranks(2)
def test_what_is_computed_replicated_equals_one_process(comm):
    grid, i, w = grid_over(comm, n=comm.size), indices(8, 6), normal(ROWS, 5)
    table, expected = w.clone().requires_grad_(), w.clone().requires_grad_()
    found = F.embedding(dc.scatter(i, grid, dims="n-"), table, sparse=True)
    assert found.dist.axes[0] == "n"
    (found * found).sum().backward()
    (F.embedding(i, expected, sparse=True) ** 2).sum().backward()
    close(table.grad.to_dense(), expected.grad.to_dense(), "a sparse gradient")
    offsets = torch.tensor([0, 3, 3, 20])
    same_as_one_process(grid, lambda i, w: F.embedding_bag(i, w, offsets), indices(30), plain=[w], dims=["n"])

    def by_frequency(i, w):
        return F.embedding_bag(i, w, mode="sum", scale_grad_by_freq=True)

    same_as_one_process(grid, by_frequency, i, plain=[w], dims=["n-"])


@pytest.mark.ranks(at_least=2)
def test_an_index_outside_the_table_raises_on_all_ranks(comm):
    i = indices(8, 6)
    i[0, 0] = ROWS
    given = dc.scatter(i, grid_over(comm, n=comm.size), dims="n-")
    raises_everywhere(comm, IndexError, "index out of range in self", lambda: F.embedding(given, normal(ROWS, 5)))
    raises_everywhere(comm, IndexError, "index out of range in self", lambda: F.embedding_bag(given, normal(ROWS, 5)))
