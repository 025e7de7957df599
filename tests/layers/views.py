"""Checks of an operator whose result is a view in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.distconv.layouts import grids, normal
from tests.layers.compare import same_as_one_process

SHAPE = (3, 4, 6, 5)

View = Callable[[Any], Any]


def check_change_reaches_source(comm: Any, view: View, recording: bool = True) -> None:
    """Check that an in-place change of the view reaches its source, with the gradients of one process if recorded."""

    def run(x: Any) -> Any:
        with torch.set_grad_enabled(recording):
            y = x * 2
            view(y).mul_(3)
            return y * x

    for grid in grids(comm, "nchw"):
        same_as_one_process(grid, run, normal(*SHAPE))


def check_view_follows_source(comm: Any, view: View, recording: bool = True) -> None:
    """Check that a view shows a later change of its source."""

    def run(x: Any) -> Any:
        with torch.set_grad_enabled(recording):
            y = x * 2
            seen = view(y)
            y.add_(1)
            y[:, :, 1].mul_(2)
            return seen * 3

    for grid in grids(comm, "nchw"):
        same_as_one_process(grid, run, normal(*SHAPE))
