"""Gradients and contributions kept by no_sync are restored as the objects that they were."""

from __future__ import annotations

import torch
from torch import nn

import distconv as dc
from distconv.capture.gradients import Gradients
from distconv.communication import gradient_reduction
from tests.distconv.capture.trained import batches, network, step_of
from tests.distconv.layouts import grids


def test_gradients_are_put_back():
    with_one, without = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with_one.grad = torch.full((2,), 3.0)
    kept, before = Gradients(), with_one.grad
    for leaf in (with_one, without):
        kept.add(leaf)
    assert kept.contains(before)
    assert not kept.contains(torch.ones(2))
    assert kept.values == [before, None]
    (with_one.sum() + without.sum()).backward()
    with_one.grad = None
    kept.put_back()
    assert with_one.grad is before
    assert without.grad is None


def test_kept_shares_are_put_back(comm):
    grid = grids(comm, "nh")[0]
    (x, t), model = batches(grid, 1)[0], dc.parallelize(network(), grid)
    kept = Gradients()
    for leaf in model.parameters():
        kept.add(leaf)
    with dc.no_sync():
        step_of(model)(x, t)
    assert bool(gradient_reduction.kept()) == (comm.size > 1)
    kept.put_back()
    assert not gradient_reduction.kept()
    assert all(p.grad is None for p in model.parameters())
