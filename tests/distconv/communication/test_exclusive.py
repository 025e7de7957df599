"""A gradient's memory is taken for a sum only where nobody else can see it."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch.autograd import Function

import distconv as dc
from distconv.communication import collectives, gradient_reduction
from distconv.communication.exclusive import count_references, is_uniquely_owned
from tests.distconv.layouts import grid_over, normal, raises_everywhere

HELD = []


class Watched(Function):
    """Notes whether the gradient that it gets is nobody else's."""

    @staticmethod
    def forward(ctx, x, found):
        ctx.found = found
        return x.view_as(x)

    @staticmethod
    def backward(ctx, share):
        held = count_references(share)
        ctx.found.append(is_uniquely_owned(share, held))
        return None, None


def _function(gradient):
    class Given(Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return gradient(grad)

    return Given.apply


def _kept(made):
    HELD.append(made)
    return made


def _kept_by_another(grad):
    made = grad.clone()
    _kept(torch.empty(0, dtype=made.dtype).set_(made))
    return made


def _with_hook(hook):
    def act(x, y):
        x.register_hook(hook)
        return (x * y).sum()

    return act


class Saved(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None


FRESH = {
    "product": lambda x, y: (x * y).sum(),
    "linear": lambda x, y: F.linear(y, x).square().sum(),
    "weight of a convolution": lambda x, y: F.conv2d(y[None, None, :, :], x[None, None, :, :]).square().sum(),
    "reshaped": lambda x, y: x.reshape(36).square().sum(),
    "used twice": lambda x, y: (x * y + x.square()).sum(),
    "rows": lambda x, y: x[torch.tensor([1, 2])].sum(),
    "made": lambda x, y: _function(torch.ones_like)(x).sum(),
}

OTHERS = {
    "the function keeps what came": lambda x, y: _function(_kept)(x).square().sum(),
    "the function keeps what it made": lambda x, y: _function(lambda g: _kept(g.clone()))(x).sum(),
    "the function keeps the base of a view": lambda x, y: _function(lambda g: _kept(g.clone()).t())(x).sum(),
    "the function keeps a view": lambda x, y: _function(lambda g: (_kept((made := g.clone()).t()), made)[1])(x).sum(),
    "the function keeps its memory by another tensor": lambda x, y: _function(_kept_by_another)(x).sum(),
    "saved for backward": lambda x, y: Saved.apply(x, y).sum(),
    "an array's memory": lambda x, y: _function(lambda g: torch.from_numpy(np.ones(g.shape)))(x).sum(),
    "expanded": lambda x, y: x.sum(),
    "transposed": lambda x, y: (x.t() * y).sum(),
    "a hook keeps it": _with_hook(lambda grad: HELD.append(grad)),
    "a hook's result is kept": _with_hook(lambda grad: _kept(grad * 2)),
    "given to backward()": lambda x, y: x.view_as(x),
}


def _noticed(action):
    found = []
    x, y = normal(6, 6, seed=1).requires_grad_(), normal(6, 6, seed=2)
    result = action(Watched.apply(x, found), y)
    given = None if result.dim() == 0 else torch.ones(6, 6, dtype=torch.float64)
    result.backward(given)
    HELD.clear()
    return found


@pytest.mark.parametrize("action", FRESH.values(), ids=FRESH)
def test_fresh_gradients_are_nobody_elses(action):
    assert _noticed(action) == [True]


@pytest.mark.parametrize("action", OTHERS.values(), ids=OTHERS)
def test_those_that_others_hold_are_not(action):
    assert _noticed(action) == [False]


@pytest.fixture(params=[0, 100])
def alone(request, monkeypatch):
    """All shares have sums of their own, or those of 100 bytes."""
    monkeypatch.setattr(gradient_reduction, "UNBUCKETED_BYTES", request.param)


@pytest.mark.usefixtures("alone")
@pytest.mark.ranks(at_least=2, at_most=4)
def test_memory_that_others_see_stays_what_it_was(comm):
    """Two leaves that autograd hands one tensor, a hook on one rank, and a gradient that the caller has given."""
    grid = grid_over(comm, n=comm.size)
    leaves = [torch.nn.Parameter(normal(6, 6, seed=seed)) for seed in (1, 2)]
    for number, leaf in enumerate(leaves):
        gradient_reduction.defer_grad_reduction(leaf, str(number))
    entered = [collectives.with_grad_allreduce(leaf, grid, ("n",)) for leaf in leaves]
    seen = []
    if comm.rank == comm.size - 1:
        entered[0].register_hook(lambda grad: seen.append((grad, grad.clone())) and None)
    given = normal(6, 6, seed=3) + comm.rank
    before = given.clone()
    (entered[0] + entered[1]).backward(given)
    expected = sum(comm.allgather(before))
    for leaf in leaves:
        torch.testing.assert_close(leaf.grad, expected)
    assert torch.equal(given, before)
    assert all(torch.equal(*pair) for pair in seen)
    assert len(seen) == (comm.rank == comm.size - 1)


@pytest.mark.ranks(2)
def test_a_large_share_is_summed_without_a_copy(comm, monkeypatch):
    """The sum is in the memory that the weight's gradient came in, and the gradient is that."""
    came, summed = {}, {}
    defer, start = gradient_reduction.enqueue_contribution, gradient_reduction.Reduction

    def deferring(leaf, share, *args, **options):
        came[leaf] = share.data_ptr()
        defer(leaf, share, *args, **options)

    def starting(group, tensor, what, op=MPI.SUM):
        summed[what] = tensor.data_ptr()
        return start(group, tensor, what, op)

    monkeypatch.setattr(gradient_reduction, "enqueue_contribution", deferring)
    monkeypatch.setattr(gradient_reduction, "Reduction", starting)
    grid = grid_over(comm, n=2)
    torch.manual_seed(0)
    layers = torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 3)
    model = dc.parallelize(torch.nn.Sequential(*layers), grid)
    model(dc.scatter(torch.ones(4, 512), grid)).sum().backward()
    weight = model[0].weight
    assert list(summed) == ["gradient sum of 0.weight", "gradient sum of 3 parameters"]
    assert weight.grad.data_ptr() == summed["gradient sum of 0.weight"] == came[weight]


@pytest.mark.ranks(2)
def test_large_weights_are_compared_as_others_are(comm, monkeypatch):
    """Those of a bucket whose other weights are small."""
    monkeypatch.setattr(gradient_reduction, "UNBUCKETED_BYTES", 100)
    grid = grid_over(comm, n=2)
    torch.manual_seed(0)
    model = dc.parallelize(torch.nn.Linear(8, 12), grid)
    if comm.rank:
        with torch.no_grad():
            model.weight[3, 3] += 1
    x = dc.scatter(torch.ones(4, 8), grid)
    raises_everywhere(comm, dc.MismatchError, "'weight'", lambda: model(x).sum().backward())


def _accumulated(grid, dtype):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 5)).to(dtype)
    if grid is not None:
        dc.parallelize(model, grid)
    for number in range(3):
        x = normal(6, 8, seed=number).to(dtype)
        with contextlib.nullcontext() if grid is None or number != 1 else dc.no_sync():
            model(x if grid is None else dc.scatter(x, grid)).float().square().sum().backward()
    return [dc.gather(parameter.grad) for parameter in model.parameters()]


@pytest.mark.ranks(2, 3)
def test_accumulated_shares(comm, monkeypatch):
    grid = grid_over(comm, n=comm.size)
    monkeypatch.setattr(gradient_reduction, "UNBUCKETED_BYTES", 0)
    for ours, theirs in zip(_accumulated(grid, torch.float64), _accumulated(None, torch.float64), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once_either_way(comm, monkeypatch, dtype):
    grid, found = grid_over(comm, n=comm.size), []
    for alone_bytes in (0, 1 << 20):
        monkeypatch.setattr(gradient_reduction, "UNBUCKETED_BYTES", alone_bytes)
        found.append(_accumulated(grid, dtype))
    for alone, packed in zip(*found, strict=True):
        assert alone.dtype == dtype
        assert torch.equal(alone, packed)
