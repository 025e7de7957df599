"""Guards: what differs from a recording is named; what is as it was is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

import distconv as dc
from distconv.capture.guards import (
    ArgumentGuard,
    ModuleGuard,
    OptimizerGuard,
    TensorGuard,
    current_modes,
    describe_mode_change,
)
from tests.distconv.layouts import grid_over

CHANGED = {
    "shape": torch.ones(2, 4),
    "a block with strides": torch.ones(3, 2).t(),
    "dtype": torch.ones(2, 3, dtype=torch.float64),
    "requires_grad": torch.ones(2, 3, requires_grad=True),
    "a block with strides and offset": torch.ones(9)[3:].view(2, 3),
    "type": nn.Parameter(torch.ones(2, 3)),
}


def describe_change(args, other):
    leaves, spec = tree_flatten(args)
    return ArgumentGuard(leaves, spec).describe_change(other, *tree_flatten(other))


@pytest.mark.parametrize("what", CHANGED)
def test_another_tensor_is_named(what):
    args = ({"image": torch.ones(2, 3)}, 5)
    assert describe_change(args, ({"image": torch.zeros(2, 3)}, 5)) == ""
    assert describe_change(args, ({"image": CHANGED[what]}, 5)).startswith(f"argument 0['image'] has {what}")


@pytest.mark.parametrize(("before", "now"), [(5, 6), (5, 5.0), (True, 1), ("a", "b"), (None, 0), (torch.ones(1), 1)])
def test_other_values_are_named(before, now):
    assert describe_change((before,), (before,)) == ""
    assert describe_change((before,), (now,)).startswith("argument 0 ")


def test_another_structure_and_other_aliases_are_named():
    x, y = torch.ones(2), torch.ones(2)
    assert describe_change((x, [y]), (x, (y,))) == "the arguments have another tree structure"
    assert describe_change((x, y), (x, x)) == "the arguments that are the same tensor are not those of the recording"
    assert describe_change((x, x), (y, y)) == ""


@pytest.mark.ranks(2)
def test_another_distribution_is_named(comm):
    x = torch.ones(4, 4, 4, 4)
    rows, samples = (dc.scatter(x, grid_over(comm, **{axis: comm.size})) for axis in "hn")
    assert describe_change((rows,), (rows,)) == ""
    assert describe_change((rows,), (samples,)).startswith("argument 0 has distribution")


def test_modules_with_their_submodules():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    known = ModuleGuard([model])
    assert known.describe_change() == ""
    model[1].eval()
    assert known.describe_change() == "BatchNorm1d.training is False, recorded with True"
    model[1].train()
    other = "Linear has other parameters, buffers, submodules or hooks"
    for register in (
        model[0].register_forward_pre_hook,
        model[0].register_forward_hook,
        model[0].register_full_backward_hook,
        model[0].register_full_backward_pre_hook,
    ):
        handle = register(lambda *_: None)
        assert known.describe_change() == other
        handle.remove()
        assert known.describe_change() == ""
    del model[0].bias
    assert known.describe_change() == other


def test_tensors():
    x, w = torch.ones(4, 4), nn.Parameter(torch.ones(4, 4))
    known = TensorGuard([x, w, x])
    x.mul_(2)
    assert known.describe_change() == ""
    x.data = x.data.t()
    assert known.describe_change().endswith("other strides")
    x.data = torch.ones(4, 4)
    assert known.describe_change().endswith("other memory")
    known = TensorGuard([w])
    for register in (w.register_hook, w.register_post_accumulate_grad_hook):
        handle = register(lambda g: None)
        assert known.describe_change().endswith("other hooks")
        handle.remove()
    w.requires_grad_(False)
    assert known.describe_change().endswith("another requires_grad")
    w.data = w.data.view(2, 8)
    assert known.describe_change().endswith("another shape")


def _optimizer(**options):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1, **options)


def _observe_step(optimizer):
    found, refusals = OptimizerGuard(), []
    with found.observe_steps(refusals.append):
        optimizer.step()
    return found, refusals


def test_settings_and_state_of_optimizers():
    optimizer = _optimizer(momentum=0.9)
    optimizer.step()
    (state,) = optimizer.state.values()
    found, refusals = _observe_step(optimizer)
    assert refusals == []
    optimizer.step()  # changes values of tensors alone
    assert found.describe_change() == ""
    optimizer.param_groups[0]["lr"] = 0.2
    assert found.describe_change() == "SGD's lr is 0.2, recorded with 0.1"
    optimizer.param_groups[0]["lr"] = 0.1
    state["momentum_buffer"] = torch.zeros(2)
    assert found.describe_change() == "SGD's momentum_buffer is another tensor"
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert found.describe_change() == "SGD has other state or parameters"


def test_state_and_settings_that_a_step_makes_are_refused_and_removed():
    optimizer = _optimizer(momentum=0.9)
    found, refusals = _observe_step(optimizer)
    assert len(refusals) == 1
    assert refusals[0].startswith("SGD has other state or parameters after its step. Take one step without dc.capture")
    assert not optimizer.state
    optimizer = _optimizer()
    optimizer.register_step_post_hook(lambda self, *_: self.param_groups[0].update(lr=0.5))
    found, refusals = _observe_step(optimizer)
    assert refusals[0].startswith("SGD's lr is 0.5, recorded with 0.1 after its step")
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert found.describe_change() == ""


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("torch.no_grad", torch.no_grad),
        ("autocast", lambda: torch.autocast("cpu", torch.bfloat16)),
        ("dc.no_sync", dc.no_sync),
        ("torch.inference_mode", torch.inference_mode),
    ],
)
def test_modes(name, mode):
    before = current_modes()
    with mode():
        now = current_modes()
        assert describe_mode_change(before)
    assert now[name] != before[name]
    assert describe_mode_change(before) == ""
