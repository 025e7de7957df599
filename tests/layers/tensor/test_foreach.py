"""Optimizers, gradient clipping and scaling on a mixture of plain and distributed parameters, against one process."""

from __future__ import annotations

import pytest
import torch
from torch import optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import distconv as dc
from tests.distconv.layouts import grid_over, normal
from tests.layers.compare import close, whole
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS


def parameters(grid: dc.ProcessGrid | None) -> list[torch.Tensor]:
    """Three leaves; with a grid the filters of the first and the columns of the last are split."""
    filters, bias, matrix = normal(5, 3, 3, 2, seed=1), normal(7, seed=2), normal(6, 4, seed=4)
    found = [filters.clone(), bias.clone(), matrix.clone()]
    if grid is not None:
        found[0] = dc.scatter(filters, grid, dims=("c", None, None, None))
        found[2] = dc.scatter(matrix, grid, dims=(None, "c"))
    for parameter in found:
        parameter.requires_grad_()
        parameter._is_param = True
    assert grid is None or all(isinstance(p, torch.nn.Parameter) for p in found)
    return found


def loss(filters: torch.Tensor, bias: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    squares = (filters * filters * normal(5, 1, 1, 1, seed=7)).sum() + 0.1 * filters[:3].sum() ** 2
    return squares + 0.1 * (bias**3).sum() + (matrix * bias[:4]).sin().sum()


def train(grid, make, between=lambda found: None, steps=3):
    """Parameters after some steps of the optimizer ``make`` makes."""
    found = parameters(grid)
    optimizer = make(found)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss(*found).backward()
        between(found)
        optimizer.step()
    return found


def same_weights(found, expected):
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        close(whole(one), other.detach(), f"parameter {number}")


OPTIMIZERS = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "RMSprop": {"lr": 0.1, "momentum": 0.5, "centered": True},
    "Adagrad": {"lr": 0.1},
    "NAdam": {"lr": 0.1},
    "ASGD": {},
    "Rprop": {},
    "Adafactor": {"lr": 0.1},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("foreach", [False, True])
@UP_TO_FOUR_RANKS
def test_an_optimizer_steps_as_in_one_process(comm, name, foreach):
    def make(found):
        return getattr(optim, name)(found, foreach=foreach, **OPTIMIZERS[name])

    same_weights(train(grid_over(comm, c=comm.size), make), train(None, make))


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch before 2.9 has no Muon")
@UP_TO_FOUR_RANKS
def test_an_optimizer_that_rounds_to_half_precision_steps_as_in_one_process(comm):
    def make(found):
        return optim.Muon([p for p in found if p.dim() == 2], lr=0.1)

    same_weights(train(grid_over(comm, c=comm.size), make), train(None, make))


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@UP_TO_FOUR_RANKS
def test_gradients_are_clipped_by_their_global_norm(comm, foreach, norm_type):
    norms = []

    def clip(found):
        norms.append(float(clip_grad_norm_(found, 0.7, norm_type, foreach=foreach)))

    def make(found):
        return optim.SGD(found, lr=0.1)

    same_weights(train(grid_over(comm, c=comm.size), make, clip), train(None, make, clip))
    assert norms[:3] == pytest.approx(norms[3:], rel=1e-12)


@pytest.mark.parametrize("foreach", [None, False, True])
def test_gradients_are_clipped_by_value(comm, foreach):
    def clip(found):
        clip_grad_value_(found, 0.3, foreach=foreach)

    def make(found):
        return optim.SGD(found, lr=0.1)

    same_weights(train(grid_over(comm, c=comm.size), make, clip), train(None, make, clip))


def test_the_norm_of_plain_and_distributed_tensors(comm):
    expected = get_total_norm([p.detach() for p in parameters(None)])
    for foreach in (None, False, True):
        found = get_total_norm([p.detach() for p in parameters(grid_over(comm, c=comm.size))], foreach=foreach)
        assert float(found) == pytest.approx(float(expected), rel=1e-12)


def test_averaged_weights_are_those_of_one_process(comm):
    grid = grid_over(comm, c=comm.size)
    for average in (optim.swa_utils.get_ema_multi_avg_fn(0.9), optim.swa_utils.get_swa_multi_avg_fn()):
        averaged = []
        for each in (grid, None):
            old = [p.detach().clone() for p in parameters(each)]
            average(old, [p.detach() * 3 for p in parameters(each)], torch.tensor(4))
            averaged.append(old)
        same_weights(*averaged)


@pytest.mark.fault(41)
@pytest.mark.ranks(at_least=2)
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(comm):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    found = parameters(grid_over(comm, c=comm.size))
    optimizer = optim.SGD(found, lr=0.1)
    for infinite in (False, True):
        before = [whole(p).clone() for p in found]
        optimizer.zero_grad()
        scaler.scale(loss(*found)).backward()
        if infinite and comm.rank == 0:
            found[0].local.grad[0, 0, 0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(whole(p), b) for p, b in zip(found, before, strict=True)) == infinite
    assert set(comm.allgather(scaler.get_scale())) == {2.0}


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad])
def test_a_fused_optimizer_steps_as_one_that_is_not(comm, kind):
    stepped = []
    for fused in (False, True):
        found = parameters(grid_over(comm, c=comm.size))
        optimizer = kind(found, lr=0.1, fused=fused)
        for _ in range(2):
            optimizer.zero_grad()
            loss(*found).backward()
            optimizer.step()
        stepped.append([whole(p.detach()) for p in found])
    for one, other in zip(*stepped, strict=True):
        close(other, one, kind.__name__)
