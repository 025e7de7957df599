"""An optimizer that takes its step is put back, and what differs is described."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distconv.capture.watch.optimizers import Optimizers


def _optimizer(**options):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1, **options)


def _noted(optimizer):
    found, said = Optimizers(), []
    with found.noted(said.append):
        optimizer.step()
    return found, said


def test_settings_and_state_count():
    optimizer = _optimizer(momentum=0.9)
    optimizer.step()
    (state,) = optimizer.state.values()
    found, said = _noted(optimizer)
    assert said == []
    assert found.difference() == ""
    optimizer.step()  # what is in tensors does not count
    assert found.difference() == ""
    optimizer.param_groups[0]["lr"] = 0.2
    assert found.difference() == "SGD's lr is another (0.1 before, 0.2 now)"
    optimizer.param_groups[0]["lr"] = 0.1
    state["momentum_buffer"] = torch.zeros(2)
    assert found.difference() == "SGD's momentum_buffer is another"
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert found.difference() == "SGD has other state or parameters"


def test_state_that_the_step_makes_is_said_and_taken_back():
    optimizer = _optimizer(momentum=0.9)
    found, said = _noted(optimizer)
    assert len(said) == 1
    assert said[0].startswith("SGD has other state or parameters after it: ")
    assert not optimizer.state
    assert found.difference() == ""


def test_settings_that_a_step_changes_are_put_back():
    optimizer = _optimizer()
    optimizer.register_step_post_hook(lambda self, *_: self.param_groups[0].update(lr=0.5))
    found, said = _noted(optimizer)
    assert said[0].startswith("SGD's lr is another (0.1 before, 0.5 now) after it")
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert found.difference() == ""


def test_an_optimizer_without_a_step_does_not_count():
    optimizer = _optimizer()
    found = Optimizers()
    with found.noted(pytest.fail):
        pass
    optimizer.param_groups[0]["lr"] = 0.2
    assert found.difference() == ""
