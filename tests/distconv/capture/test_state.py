"""Gradients and kept shares are put back as the objects that they were; settings are told apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.capture import state
from distconv.communication import gradient_reduction
from tests.distconv.capture.trained import batches, network, step_of
from tests.distconv.layouts import grids


def test_gradients_are_put_back():
    with_one, without = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with_one.grad = torch.full((2,), 3.0)
    kept, before = state.State(), with_one.grad
    for leaf in (with_one, without):
        kept.add(leaf)
    assert kept.has(before)
    assert not kept.has(torch.ones(2))
    assert state.described([with_one, without]) == (((torch.float32, torch.strided), None), ())
    (with_one.sum() + without.sum()).backward()
    with_one.grad = None
    kept.put_back()
    assert with_one.grad is before
    assert without.grad is None


def test_kept_shares_are_put_back(comm):
    grid = grids(comm, "nh")[0]
    (x, t), model = batches(grid, 1)[0], dc.parallelize(network(), grid)
    kept = state.State()
    for leaf in model.parameters():
        kept.add(leaf)
    with dc.no_sync():
        step_of(model)(x, t)
    described = state.described(model.parameters())
    assert bool(described[1]) == (comm.size > 1)
    kept.put_back()
    assert not gradient_reduction.kept()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("gradients (torch.no_grad)", torch.no_grad),
        ("autocast", lambda: torch.autocast("cpu", torch.bfloat16)),
        ("dc.no_sync", dc.no_sync),
        ("inference mode", torch.inference_mode),
    ],
)
def test_settings_are_told_apart(name, mode):
    before = state.modes()
    with mode():
        now = state.modes()
    assert now[name] != before[name]
    assert state.modes() == before
