"""Modules and tensors that are not what they were are described."""

from __future__ import annotations

import torch
from torch import nn

from distconv.capture.watch.modules import Modules, Tensors


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = {"factor": 1.0}

    def forward(self, x):
        return x * self.options["factor"]


def test_what_is_in_modules_counts():
    module = Scaled()
    known = Modules([module])
    assert known.difference() == ""
    module.options["factor"] = 2.0
    assert known.difference() == "Scaled.options['factor'] is not what it was (1.0 before, 2.0 now)"
    module.options["factor"] = 1.0
    assert known.difference() == ""


def test_modules_are_looked_at_with_their_parts():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    known = Modules([model])
    assert known.modules == [model, model[0], model[1]]
    assert known.difference() == ""
    model[1].eval()
    assert known.difference() == "BatchNorm1d.training is not what it was (True before, False now)"
    model[1].train()
    model[1].eps = float("1e-05")  # an equal number
    assert known.difference() == ""
    handle = model[0].register_forward_pre_hook(lambda *_: None)
    assert known.difference() == "Linear has other parameters, buffers, parts or hooks"
    handle.remove()
    assert known.difference() == ""
    del model[0].bias
    assert known.difference() == "Linear has other parameters, buffers, parts or hooks"


def test_tensors_stay_where_they_are():
    x, w = torch.ones(4, 4), nn.Parameter(torch.ones(4, 4))
    known = Tensors([x, w, x])
    x.mul_(2)
    assert known.difference() == ""
    x.data = x.data.t()
    assert known.difference().endswith("other strides")
    x.data = torch.ones(4, 4)
    assert known.difference().endswith("another storage")
    known = Tensors([w])
    handle = w.register_hook(lambda g: g)
    assert known.difference().endswith("other hooks")
    handle.remove()
    w.requires_grad_(False)
    assert known.difference().endswith("another requires_grad")
    w.data = w.data.view(2, 8)
    assert known.difference().endswith("another shape")
