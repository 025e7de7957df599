"""Where a stage's graph begins: the gradient that reaches it, work in place on it, and what a stage may return."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.pipeline.stage.stage_inputs import StageInput
from tests.distconv.layouts import grid_over, normal


def test_what_enters_may_be_changed_in_place_and_still_gets_its_gradient():
    value = normal(3, 4)
    entry = StageInput(value.clone())
    inside = entry.enter()
    assert inside.data_ptr() == entry.value.data_ptr() and not inside.is_leaf
    before = value.clone().requires_grad_()
    F.relu_(inside.mul_(3)).sum().backward()
    F.relu(before * 3).sum().backward()
    assert torch.equal(entry.gradient, before.grad)
    assert entry.value.grad is None


def test_a_gradient_stays_in_the_memory_order_in_which_it_came():
    entry = StageInput(normal(2, 3, 4, 5).to(memory_format=torch.channels_last))
    gradient = normal(2, 3, 4, 5, seed=1)
    entry.enter().backward(gradient)
    assert torch.equal(entry.gradient, gradient)
    assert entry.gradient.stride() == gradient.stride() != entry.value.stride()


def test_an_entry_that_no_gradient_reaches_has_none():
    entry = StageInput(normal(3))
    assert entry.gradient is None
    x = normal(3, seed=1).requires_grad_()
    (entry.enter().detach() * x).sum().backward()
    assert entry.gradient is None and x.grad is not None


def test_an_entry_is_cut_off_from_the_graph_that_made_it():
    x = normal(3).requires_grad_()
    entry = StageInput(x * 2)
    entry.enter().sum().backward()
    assert x.grad is None and entry.gradient.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("value", "first", "wanted"),
    [
        (torch.ones(2), False, True),
        (torch.ones(2, dtype=torch.complex64), False, True),
        (torch.ones(2, dtype=torch.int64), False, False),
        (torch.ones(2, dtype=torch.bool), False, False),
        (torch.ones(2), True, False),
        (torch.ones(2, requires_grad=True), True, True),
    ],
)
def test_samples_receive_a_gradient_if_they_require_one_and_other_inputs_if_they_can(value, first, wanted):
    entry = StageInput(value, first=first)
    assert entry.value.requires_grad is entry.enter().requires_grad is wanted


def test_over_a_grid_the_gradient_is_distributed_as_what_entered(comm):
    x = dc.scatter(normal(2, 3, 8, 4), grid_over(comm, h=comm.size))
    entry = StageInput(x)
    inside = entry.enter()
    assert isinstance(inside, dc.DistTensor) and inside.dist == x.dist and inside.shape == x.shape
    (inside * inside).sum().replicated().backward()
    assert entry.gradient.dist == x.dist
    assert torch.equal(dc.gather(entry.gradient), 2 * normal(2, 3, 8, 4))


def test_a_stage_does_not_change_the_samples_of_the_caller_and_their_memory_format_is_kept():
    x = normal(2, 3, 4, 5).to(memory_format=torch.channels_last)
    before = x.clone()
    entry = StageInput(x, first=True)
    entry.enter().zero_()
    assert torch.equal(x, before) and entry.value.stride() == x.stride()
