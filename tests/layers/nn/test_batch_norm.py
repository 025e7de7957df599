"""Batch norm: statistics of the global mini-batch, running averages, gradients, against one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import built, check_module_same_as_one_process, close, same_as_one_process

KINDS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d}


def norm(count):
    def make():
        module = KINDS[count](4)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        return module

    return built(make)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(2, 1), (2, 1, 4), (0, 3), (2, 3, 0)], ids=str)
def test_ranks_without_channels_or_values_go_the_same_way(comm, shape, training):
    channels = shape[1]

    def call(x, w=None, b=None):
        mean, var = torch.zeros(channels, dtype=x.dtype), torch.ones(channels, dtype=x.dtype)
        return F.batch_norm(x, mean, var, w, b, training)

    for axis in "ncw":
        dims = ("n", "c", "w")[: len(shape)]
        plain = (normal(channels), normal(channels, seed=1))
        for given in ((), plain):
            grid = grid_over(comm, **{axis: comm.size})
            same_as_one_process(grid, call, normal(*shape), plain=given, dims=[dims])


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_may_be_distributed(comm, training):
    for axes in (("n", "c", None), (None, "c", None), ("n", None, None)):
        grid = grid_over(comm, **{axes[1] or axes[0]: comm.size})
        kept = [normal(4, seed=5), normal(4, seed=6) ** 2]
        split = [dc.scatter(t.clone(), dc.Distribution(grid, axes[1:2])) for t in kept]
        x = normal(3, 4, 5)
        expected = F.batch_norm(x, *kept, training=training)
        found = F.batch_norm(dc.scatter(x, dc.Distribution(grid, axes)), *split, training=training)
        close(dc.gather(found), expected, "y")
        for running, of_one in zip(split, kept, strict=True):
            close(dc.gather(running), of_one, "running statistics")


def test_a_mini_batch_without_samples_leaves_running_statistics_alone(comm):
    for grid in grids(comm, "nch"):
        check_module_same_as_one_process(grid, norm(2), torch.zeros(0, 4, 7, 5, dtype=torch.float64))


def test_no_values_at_all_are_no_error(comm):
    for training in (True, False):
        norm = partial(F.batch_norm, running_mean=torch.zeros(0), running_var=torch.ones(0), training=training)
        same_as_one_process(grid_over(comm, n=comm.size), norm, normal(0))


def test_the_function_of_torch_takes_the_same_in_another_order(comm):
    def call(x, w, b):
        return torch.batch_norm(x, w, b, torch.zeros(4).double(), torch.ones(4).double(), True, 0.1, 1e-5, True)

    for grid in grids(comm, "nhw"):
        same_as_one_process(grid, call, normal(3, 4, 5, 6), plain=(normal(4), normal(4, seed=1)))


@pytest.mark.parametrize("axes", [("r", None, None, None), (None, None, "r", None), (None, None, "c", "n")])
def test_axes_of_any_name_may_split_the_input(comm, axes):
    extents = {"n": 1, next(axis for axis in axes if axis): comm.size}
    dist = dc.Distribution(grid_over(comm, **extents), axes)
    check_module_same_as_one_process(dist, norm(2), normal(3, 4, 7, 5))


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_only_one_gradient_may_be_wanted(comm, wanted):
    tensors = [normal(3, 4, 7, 5), normal(4, seed=1), normal(4, seed=2)]
    for grid in grids(comm, "nh"):
        grads = []
        for place in (lambda t: t, lambda t, grid=grid: dc.scatter(t, grid)):
            given = [t.clone().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
            x = place(tensors[0]).clone().requires_grad_(wanted == 0)
            (F.batch_norm(x, None, None, given[1], given[2], True) ** 3).sum().backward()
            grads.append(dc.gather((x if wanted == 0 else given[wanted]).grad))
        close(grads[1], grads[0], f"gradient {wanted}")


class FunctionalNorm(nn.Module):
    """Batch norm as a function, in a module that is not a batch norm layer."""

    def forward(self, x):
        return F.batch_norm(x, None, None, training=True)


def test_statistics_of_each_block_alone_are_those_of_torch_on_the_block(comm):
    grid = grid_over(comm, h=comm.size)
    x = dc.scatter(normal(3, 4, 17, 5), grid)
    y = dc.parallelize(FunctionalNorm(), grid, batch_norm="local")(x)
    close(y.local, FunctionalNorm()(x.local), "local statistics")
    close(dc.gather(FunctionalNorm()(x)), FunctionalNorm()(dc.gather(x)), "another module's statistics")


def test_spatial_statistics_are_those_of_the_samples_a_rank_shares(comm):
    for grid in grids(comm, "nhw"):
        whole = normal(2 * comm.size, 4, 9, 5)
        x = dc.scatter(whole, grid)
        y = dc.parallelize(FunctionalNorm(), grid, batch_norm="spatial")(x)
        rows = x.box()[0]
        found = y.replicated([2, 3]).local
        close(found, FunctionalNorm()(whole[rows.start : rows.stop]), "spatial statistics")


@pytest.mark.ranks(at_least=2)
def test_one_value_per_channel_on_a_rank_raises_for_local_statistics(comm):
    grid = grid_over(comm, h=comm.size)
    x = dc.scatter(normal(1, 4, comm.size, 1), grid)
    model = dc.parallelize(nn.Sequential(norm(2), FunctionalNorm()), grid, batch_norm="local")
    raises_everywhere(comm, dc.ShapeError, "has 1 values per channel", lambda: model(x))
    close(
        dc.gather(F.batch_norm(x, None, None, training=True)), F.batch_norm(dc.gather(x), None, None, training=True), ""
    )


@pytest.mark.fault(15)
@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (1, 4)])
def test_one_value_per_channel_raises_torchs_error(comm, shape):
    module = norm(1 if len(shape) == 2 else 2)
    with pytest.raises(ValueError) as caught:
        module(normal(*shape))
    x = dc.scatter(normal(*shape), grid_over(comm, n=comm.size))
    text = raises_everywhere(comm, dc.ShapeError, "Expected more than 1 value per channel", lambda: module(x))
    assert str(caught.value).split("[")[0] in text


@pytest.mark.ranks(at_least=2)
def test_strides_that_torch_takes_for_channels_last_do_no_harm(comm):
    for grid in grids(comm, "hw"):
        module = norm(2)
        turned = dc.scatter(normal(5, 4, comm.size, 9), grid)
        turned.local = turned.local.transpose(1, 3).contiguous().transpose(1, 3)
        x, w, b = normal(5, 4, comm.size, 9).requires_grad_(), module.weight, module.bias
        gradient = normal(5, 4, comm.size, 9, seed=4)
        expected = torch.autograd.grad(F.batch_norm(x, None, None, w, b, True), (x, w, b), gradient)
        turned.requires_grad_()
        found = torch.autograd.grad(F.batch_norm(turned, None, None, w, b, True), (turned, w, b), gradient)
        for one, other in zip(found, expected, strict=True):
            close(dc.gather(one), other, f"gradient on {grid}")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.ranks(at_least=2)
def test_gradients_of_tokens_of_one_sample_have_odd_strides_that_do_no_harm(comm, training):
    mean, var = normal(6, seed=1), normal(6, seed=2).exp()
    weight, tokens = normal(6, seed=3), normal(8, 6, seed=4)

    def tokenized(x, weight):
        y = F.batch_norm(x * 2, mean.clone(), var.clone(), weight, training=training)
        return y.flatten(2).transpose(1, 2) * tokens

    for odd in (False, True):
        x = normal(comm.size, 8, 6).transpose(1, 2).reshape(comm.size, 6, 2, 4) if odd else normal(comm.size, 6, 2, 4)
        same_as_one_process(grid_over(comm, n=comm.size), tokenized, x, plain=[weight])


@pytest.mark.ranks(2)
def test_sync_batch_norm_does_not_call_torch_distributed_if_it_is_initialized(comm, monkeypatch):
    """torch's own forward pass rejects tensors of the CPU then."""
    grid, x = grid_over(comm, n=2), normal(4, 3, 5)
    layer = dc.parallelize(nn.SyncBatchNorm(3).double(), grid)
    expected = nn.BatchNorm1d(3).double()(x).detach()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    close(dc.gather(layer(dc.scatter(x, grid)).detach()), expected, "y")


@pytest.mark.fault(95)
@pytest.mark.cpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize("scale", [1.0, 3e-3, 1e-3])
def test_gradients_in_half_precision_are_as_near_as_torchs(comm: Any, scale: float) -> None:
    torch.manual_seed(0)
    x, dy = (torch.randn(6, 4, 9, 8) * scale).half(), (torch.randn(6, 4, 9, 8) + 0.3).half()
    exact, plain, parallel = nn.BatchNorm2d(4).double(), nn.BatchNorm2d(4).half(), nn.BatchNorm2d(4).half()

    def gradient(layer: nn.Module, given: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        given = given.detach().requires_grad_()
        layer(given).backward(seed)
        assert given.grad is not None
        return given.grad

    expected = gradient(exact, x.double(), dy.double())
    found = [gradient(plain, x, dy)]
    for axis in "nhc":
        grid = grid_over(comm, **{axis: comm.size})
        found.append(dc.gather(gradient(dc.parallelize(parallel, grid), dc.scatter(x, grid), dc.scatter(dy, grid))))
    off = [float((each.double() - expected).norm() / expected.norm()) for each in found]
    assert max(off[1:]) <= 1.5 * off[0]
