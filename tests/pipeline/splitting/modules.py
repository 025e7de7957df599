"""Modules whose forward is written in the test."""

from __future__ import annotations

from torch import nn


def model_of(forward, **modules):
    """A module with the given submodules and forward(self, x)."""
    made = type("Written", (nn.Module,), {"forward": forward})()
    for name, module in modules.items():
        if isinstance(module, nn.Module | nn.Parameter):
            setattr(made, name, module)
        else:
            made.register_buffer(name, module)
    return made


def linears(*names):
    return {name: nn.Linear(3, 3) for name in names}
