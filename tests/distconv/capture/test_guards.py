"""Guards: what differs from a recording is named; what is as it was is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

import distconv as dc
from distconv.capture.guards import Arguments, Modules, Optimizers, Tensors, mode_difference, modes
from tests.distconv.layouts import grid_over

CHANGED = {
    "shape": torch.ones(2, 4),
    "a block with strides": torch.ones(3, 2).t(),
    "dtype": torch.ones(2, 3, dtype=torch.float64),
    "requires_grad": torch.ones(2, 3, requires_grad=True),
    "a block with strides and offset": torch.ones(9)[3:].view(2, 3),
    "type": nn.Parameter(torch.ones(2, 3)),
}


def difference(args, other):
    leaves, spec = tree_flatten(args)
    return Arguments(leaves, spec).difference(other, *tree_flatten(other))


@pytest.mark.parametrize("what", CHANGED)
def test_another_tensor_is_named(what):
    args = ({"image": torch.ones(2, 3)}, 5)
    assert difference(args, ({"image": torch.zeros(2, 3)}, 5)) == ""
    assert difference(args, ({"image": CHANGED[what]}, 5)).startswith(f"argument 0['image'] has {what}")


@pytest.mark.parametrize(("before", "now"), [(5, 6), (5, 5.0), (True, 1), ("a", "b"), (None, 0), (torch.ones(1), 1)])
def test_other_values_are_named(before, now):
    assert difference((before,), (before,)) == ""
    assert difference((before,), (now,)).startswith("argument 0 ")


def test_another_structure_and_other_aliases_are_named():
    x, y = torch.ones(2), torch.ones(2)
    assert difference((x, [y]), (x, (y,))) == "the arguments have another structure"
    assert difference((x, y), (x, x)) == "other arguments are the same tensor"
    assert difference((x, x), (y, y)) == ""


@pytest.mark.ranks(2)
def test_another_distribution_is_named(comm):
    x = torch.ones(4, 4, 4, 4)
    rows, samples = (dc.scatter(x, grid_over(comm, **{axis: comm.size})) for axis in "hn")
    assert difference((rows,), (rows,)) == ""
    assert difference((rows,), (samples,)).startswith("argument 0 has distribution")


def test_modules_with_their_submodules():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    known = Modules([model])
    assert known.difference() == ""
    model[1].eval()
    assert known.difference() == "BatchNorm1d.training is False, recorded with True"
    model[1].train()
    other = "Linear has other parameters, buffers, submodules or hooks"
    for register in (
        model[0].register_forward_pre_hook,
        model[0].register_forward_hook,
        model[0].register_full_backward_hook,
        model[0].register_full_backward_pre_hook,
    ):
        handle = register(lambda *_: None)
        assert known.difference() == other
        handle.remove()
        assert known.difference() == ""
    del model[0].bias
    assert known.difference() == other


def test_tensors():
    x, w = torch.ones(4, 4), nn.Parameter(torch.ones(4, 4))
    known = Tensors([x, w, x])
    x.mul_(2)
    assert known.difference() == ""
    x.data = x.data.t()
    assert known.difference().endswith("other strides")
    x.data = torch.ones(4, 4)
    assert known.difference().endswith("other memory")
    known = Tensors([w])
    for register in (w.register_hook, w.register_post_accumulate_grad_hook):
        handle = register(lambda g: None)
        assert known.difference().endswith("other hooks")
        handle.remove()
    w.requires_grad_(False)
    assert known.difference().endswith("another requires_grad")
    w.data = w.data.view(2, 8)
    assert known.difference().endswith("another shape")


def _optimizer(**options):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1, **options)


def _noted(optimizer):
    found, refusals = Optimizers(), []
    with found.noted(refusals.append):
        optimizer.step()
    return found, refusals


def test_settings_and_state_of_optimizers():
    optimizer = _optimizer(momentum=0.9)
    optimizer.step()
    (state,) = optimizer.state.values()
    found, refusals = _noted(optimizer)
    assert refusals == []
    optimizer.step()  # changes values of tensors alone
    assert found.difference() == ""
    optimizer.param_groups[0]["lr"] = 0.2
    assert found.difference() == "SGD's lr is 0.2, recorded with 0.1"
    optimizer.param_groups[0]["lr"] = 0.1
    state["momentum_buffer"] = torch.zeros(2)
    assert found.difference() == "SGD's momentum_buffer is another tensor"
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert found.difference() == "SGD has other state or parameters"


def test_state_and_settings_that_a_step_makes_are_refused_and_removed():
    optimizer = _optimizer(momentum=0.9)
    found, refusals = _noted(optimizer)
    assert len(refusals) == 1
    assert refusals[0].startswith("SGD has other state or parameters after its step. Take one step without dc.capture")
    assert not optimizer.state
    optimizer = _optimizer()
    optimizer.register_step_post_hook(lambda self, *_: self.param_groups[0].update(lr=0.5))
    found, refusals = _noted(optimizer)
    assert refusals[0].startswith("SGD's lr is 0.5, recorded with 0.1 after its step")
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert found.difference() == ""


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
    before = modes()
    with mode():
        now = modes()
        assert mode_difference(before)
    assert now[name] != before[name]
    assert mode_difference(before) == ""
