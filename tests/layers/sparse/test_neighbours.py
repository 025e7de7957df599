"""Nearest points and points within a radius, against brute force and scipy's tree, on one and several ranks."""

from __future__ import annotations

import pytest
import torch
from scipy.spatial import cKDTree

import distconv as dc
from distconv.layers.sparse import knn, neighbours, radius_pairs, radius_search
from tests.distconv.layouts import grid_over
from tests.layers.sparse.clouds import normal


def on_grid(count, seed):
    """Points with small integer coordinates, so that many distances are equal and some are zero."""
    return torch.randint(0, 4, (count, 3), generator=torch.Generator().manual_seed(seed)).double()


def brute_force(points, queries, radius=float("inf")):
    """Return the sorted pairs (distance, point) within the radius of each query."""
    distances = (queries[:, None] - points[None]).square().sum(-1).sqrt().tolist()
    return [sorted((d, n) for n, d in enumerate(row) if d <= radius) for row in distances]


def reference(points, queries, slots):
    """Distances of the neighbours of each query by torch's norm, whose gradient at zero is zero; infinity for -1."""
    rows = slots.clamp(min=0)
    distances = torch.linalg.vector_norm(queries[:, None] - points[rows], dim=-1)
    return distances.where(slots >= 0, torch.inf)


@pytest.fixture(params=[1 << 22, 50], ids=["one chunk", "chunks"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(neighbours, "CHUNK_DISTANCES", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("k", [1, 4, 25])
def test_the_nearest_points_come_first_and_of_equal_ones_the_lower_index(k):
    points, queries = on_grid(25, 0), on_grid(12, 1)
    expected = [pairs[:k] for pairs in brute_force(points, queries)]
    found = knn(points, queries, k)
    assert found.indices.tolist() == [[n for _, n in pairs] for pairs in expected]
    assert found.distances.tolist() == [[d for d, _ in pairs] for pairs in expected]


@pytest.mark.usefixtures("chunk")
def test_distances_are_those_of_a_tree_and_their_gradients_those_of_the_norm():
    points, queries = normal(40, 3).requires_grad_(), normal(17, 3, seed=1).requires_grad_()
    found = knn(points, queries, 5)
    distances, indices = cKDTree(points.detach().numpy()).query(queries.detach().numpy(), 5)
    assert found.indices.tolist() == indices.tolist()
    torch.testing.assert_close(found.distances, torch.from_numpy(distances), rtol=1e-12, atol=1e-12)
    expected, direction = reference(points, queries, found.indices), normal(17, 5, seed=2)
    ours, theirs = (torch.autograd.grad(y, [points, queries], direction) for y in (found.distances, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_a_distance_of_zero_is_zero():
    points = normal(6, 2).requires_grad_()
    found = knn(points, points, 1)
    assert not found.distances.any()
    found.distances.sum().backward()
    assert not points.grad.any()


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("slots", [1, 3, 40])
@pytest.mark.parametrize("radius", [0.0, 1.0, 9.0])
def test_points_within_a_radius(radius, slots):
    points, queries = on_grid(25, 2), on_grid(12, 3)
    expected = brute_force(points, queries, radius)
    found = radius_search(points, queries, radius, slots)
    filled = [pairs[:slots] + [(float("inf"), -1)] * (slots - len(pairs)) for pairs in expected]
    assert found.indices.tolist() == [[n for _, n in pairs] for pairs in filled]
    assert found.distances.tolist() == [[d for d, _ in pairs] for pairs in filled]
    pairs = radius_pairs(points, queries, radius)
    by_index = [(q, n, d) for q, near in enumerate(expected) for n, d in sorted((n, d) for d, n in near)]
    assert list(zip(*(each.tolist() for each in pairs), strict=True)) == by_index


def test_points_that_are_not_finite_are_no_neighbours():
    points = torch.tensor([[0.0], [torch.nan], [torch.inf], [5.0]])
    assert knn(points, torch.tensor([[1.0]]), 2).indices.tolist() == [[0, 3]]
    assert radius_search(points, torch.tensor([[1.0]]), 9, 4).indices.tolist() == [[0, 3, -1, -1]]


def test_there_may_be_no_points_and_no_queries():
    none, some = torch.zeros(0, 3), torch.zeros(2, 3)
    assert knn(some, none, 1).indices.shape == (0, 1)
    assert radius_search(none, some, 1.0, 2).indices.tolist() == [[-1, -1]] * 2
    assert radius_search(none, some, 1.0, 2).distances.isinf().all()
    assert [len(each) for each in radius_pairs(none, some, 1.0)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: knn(torch.zeros(2, 3), torch.zeros(2, 3), 3), "k=3 neighbours of 2 points. Pass a k from 1"),
        (lambda: knn(torch.zeros(2, 3), torch.zeros(2, 3), 0), "k=0"),
        (lambda: knn(torch.zeros(2, 3), torch.zeros(2, 2), 1), r"Pass \(N, D\) and \(Q, D\)"),
        (lambda: radius_pairs(torch.zeros(2, 3), torch.zeros(2, 3).double(), 1), "of one dtype"),
        (
            lambda: radius_search(torch.zeros(2, 3), torch.zeros(2), 1, 2),
            r"radius_search: .* Pass \(N, D\) and \(Q, D\)",
        ),
        (lambda: radius_search(torch.zeros(2, 3), torch.zeros(2, 3), 1, 0), "max_points=0. Pass a positive number"),
    ],
)
def test_arguments_that_do_not_fit_raise(call, says):
    with pytest.raises(dc.ShapeError, match=says):
        call()


# -- over ranks -------------------------------------------------------------------------------------------------------


def uneven(grid, axis, count):
    """Boundaries of blocks of which the first is empty and the last has most."""
    parts = grid.shape[axis]
    return {axis: [0, *(min(count, part) for part in range(parts - 1)), count]}


def layouts(comm):
    """Distributions of points and of queries."""
    flat = grid_over(comm, n=comm.size)
    space = grid_over(comm, n=1, h=comm.size)
    split, columns = dc.Distribution(flat, ("n", None)), dc.Distribution(space, (None, "h"))
    rough = [dc.Distribution(flat, ("n", None), boundaries=uneven(flat, "n", count)) for count in (25, 12)]
    yield split, split
    yield rough[0], rough[1]
    yield split, dc.Distribution(flat, (None, None))
    yield dc.Distribution(flat, (None, None)), rough[1]
    yield dc.Distribution(space, ("h", None)), dc.Distribution(space, ("h", None))
    yield columns, columns
    if comm.size == 4:
        both = grid_over(comm, n=2, h=2)
        yield dc.Distribution(both, ("h", None)), dc.Distribution(both, ("n", None))


@pytest.mark.parametrize("make", [on_grid, lambda count, seed: normal(count, 3, seed=seed)], ids=["ties", "random"])
def test_over_ranks_neighbours_are_those_of_one_process(comm, make):
    given = [make(25, 4), make(12, 5)]
    calls = (
        lambda p, q: knn(p, q, 6),
        lambda p, q: radius_search(p, q, 1.0, 4),
        lambda p, q: radius_pairs(p, q, 1.0),
    )
    for call in calls:
        one = [each.clone().requires_grad_() for each in given]
        expected = call(*one)
        direction = normal(*expected.distances.shape, seed=6)
        weighted = (expected.distances.where(expected.distances.isfinite(), 0) * direction).sum()
        weighted.backward()
        for of_points, of_queries in layouts(comm):
            leaves = [each.clone().requires_grad_() for each in given]
            p, q = (
                dc.scatter(leaf, dist.grid, (None, None)).redistribute(dist)
                for leaf, dist in zip(leaves, (of_points, of_queries), strict=True)
            )
            found = call(p, q)
            for ours, theirs in zip(found, expected, strict=True):
                assert isinstance(ours, dc.DistTensor) and torch.equal(dc.gather(ours), theirs)
            distances = dc.gather(found.distances)
            (distances.where(distances.isfinite(), 0) * direction).sum().backward()
            for leaf, other in zip(leaves, one, strict=True):
                torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_plain_queries_and_split_points_give_the_result_of_one_process_on_every_rank(comm):
    points, queries = on_grid(25, 4), on_grid(12, 5)
    split = dc.scatter(points, grid_over(comm, n=comm.size), ("n", None))
    found = knn(split, queries, 3)
    assert torch.equal(dc.gather(found.indices), knn(points, queries, 3).indices)
