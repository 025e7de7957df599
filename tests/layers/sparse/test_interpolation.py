"""Interpolation against torch's grid_sample of volumes, and over ranks against one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.layers import sparse
from distconv.layers.sparse import SparseTensor, interpolate, to_dense
from tests.distconv.layouts import grid_over, raises_everywhere
from tests.layers.sparse.clouds import normal, random_cloud, rng_of
from tests.layers.sparse.test_distributed import grids


def random_points(stride, count, reach=4.5, seed=1):
    """Points around the clouds, also outside of them, on sites and in samples 1 and 3, which have no sites."""
    samples = torch.tensor([0, 2, 0, 2, 1, 3])[torch.arange(count) % 6]
    space = reach * (2 * torch.rand(count, len(stride), generator=torch.Generator().manual_seed(seed)).double() - 1)
    space[::5] = space[::5].round()
    return torch.cat([samples[:, None].double(), space * torch.tensor(stride)], 1)


def sampled(x, points, far=24):
    """The volume of each point's sample at the point, by grid_sample, which takes -1 to 1 in reversed dimensions."""
    size = 2 * far + 1
    dense = to_dense(x, [size] * x.dimension, origin=[-far * s for s in x.sites.stride])
    positions = points[:, 1:] / torch.tensor(x.sites.stride) / far
    flipped = positions.flip(1).view(len(points), *[1] * x.dimension, x.dimension)
    values = F.grid_sample(dense[points[:, 0].long()], flipped, align_corners=True)
    return values.flatten(1)


@pytest.mark.parametrize("stride", [(1, 1, 1), (2, 2, 2), (1, 2, 3)])
@pytest.mark.parametrize("dimension", [2, 3])
def test_it_is_linear_between_the_sites_of_a_volume(dimension, stride):
    stride = stride[:dimension]
    x = random_cloud(rng_of("interpolate", dimension), dimension, 3, stride=stride, sites=80)
    points = random_points(stride, 60).requires_grad_()
    found, expected = interpolate(x, points), sampled(x, points)
    assert (expected != 0).any(1).sum() > 10
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    # At a site itself the derivative by the point is one-sided, on sides that grid_sample's rounding chooses.
    inside = torch.ones(60, 1).double()
    inside[::5] = 0
    direction = normal(60, 3, seed=2) * inside
    ours, theirs = (torch.autograd.grad(y, [x.features, points], direction) for y in (found, expected))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours[1][:, 1:], theirs[1][:, 1:], rtol=1e-10, atol=1e-10)
    assert not ours[1][:, 0].any()


@pytest.mark.parametrize("dimension", [1, 4])
def test_at_sites_it_gives_their_features_and_halfway_their_mean(dimension):
    x = random_cloud(rng_of("sites", dimension), dimension, 2, sites=30)
    torch.testing.assert_close(interpolate(x, x.coords.double()), x.features, rtol=0, atol=0)
    ends = SparseTensor(torch.tensor([[0, *[0] * dimension], [0, *[0] * (dimension - 1), 1]]), normal(2, 2))
    middle = torch.tensor([[0, *[0] * (dimension - 1), 0.5]]).double()
    torch.testing.assert_close(interpolate(ends, middle), ends.features.mean(0, keepdim=True))


def test_points_far_away_and_clouds_without_sites_give_zeros():
    x = random_cloud(rng_of("far"), 2, 2, sites=20)
    far = torch.tensor([[0, 1e300, 0.0], [1, 0.0, -1e18], [3, 1e10, 1e10]], dtype=torch.float64)
    assert not interpolate(x, far).any()
    nothing = SparseTensor(torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 2), batch_size=4)
    assert not interpolate(nothing, far.float().nan_to_num(posinf=9)).any()
    assert interpolate(x, far[:0]).shape == (0, 2)


@pytest.mark.parametrize(
    ("points", "error", "says"),
    [
        (torch.zeros(2, 3, dtype=torch.long), dc.ShapeError, "Pass floating-point numbers"),
        (torch.zeros(2, 2), dc.ShapeError, r"\(M, 3\)"),
        (torch.tensor([[0.5, 0, 0]]), dc.CoordinateError, "not an index below 4"),
        (torch.tensor([[4.0, 0, 0]]), dc.CoordinateError, "not an index below 4"),
        (torch.tensor([[0.0, torch.nan, 0]]), dc.CoordinateError, "a point is not finite"),
    ],
)
def test_points_that_do_not_fit_raise(points, error, says):
    with pytest.raises(error, match=says):
        interpolate(random_cloud(rng_of("wrong"), 2, 1), points)


# -- over ranks -------------------------------------------------------------------------------------------------------


def uneven(points, grid):
    """Points over the ranks of a grid: the first rank has none, the second has most."""
    ends = (
        [0, 0, *(len(points) - grid.size + 1 + n for n in range(1, grid.size))] if grid.size > 1 else [0, len(points)]
    )
    ends[-1] = len(points)
    dist = dc.Distribution(grid.flat, ("n", None), boundaries={"n": ends})
    return dc.scatter(points, grid.flat, ("n", None)).redistribute(dist)


@pytest.mark.parametrize("place", ["plain", "balanced", "uneven"])
@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_over_ranks_it_is_as_in_one_process(comm, dimension, place):
    stride = (2, 1, 3)[:dimension]
    cloud = random_cloud(rng_of("split", dimension), dimension, 3, stride=stride, sites=60)
    count = 0 if dimension == 1 and place == "balanced" else 30
    given = [random_points(stride, count).requires_grad_() for _ in range(2)]
    features = [cloud.features.detach().clone().requires_grad_() for _ in range(2)]
    direction = normal(count, 3, seed=3)
    expected = interpolate(cloud.replace(features[0]), given[0])
    (expected * direction).sum().backward()
    for grid in grids(comm, dimension):
        for leaf in (features[1], given[1]):
            leaf.grad = None
        x = sparse.scatter(cloud.replace(features[1]), grid)
        spread = {"plain": lambda p: p, "balanced": lambda p, g=grid: dc.scatter(p, g.flat, ("n", None))}
        points = uneven(given[1], grid) if place == "uneven" else spread[place](given[1])
        found = interpolate(x, points)
        assert isinstance(found, dc.DistTensor) and (place == "plain" or found.dist == points.dist)
        torch.testing.assert_close(dc.gather(found), expected, rtol=1e-12, atol=1e-12)
        (dc.gather(found) * direction).sum().backward()
        for ours, theirs in ((features[1], features[0]), (given[1], given[0])):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.ranks(at_least=2)
def test_a_wrong_point_of_one_rank_raises_on_all(comm):
    grid = grid_over(comm, w=comm.size)
    x = sparse.scatter(random_cloud(rng_of("one"), 2, 1, sites=20), grid)
    block = torch.full((1, 3), float(comm.rank + 4 if comm.rank == 1 else 0))
    points = dc.from_local(block, dc.Distribution(grid.flat, ("n", None)), (comm.size, 3))
    raises_everywhere(comm, dc.CoordinateError, "not an index below 4", partial(interpolate, x, points))
