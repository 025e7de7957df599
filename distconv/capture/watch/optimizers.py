"""Optimizers that take their steps in a captured one: what is recorded is what they do with tensors.

The rest, their settings and what state there is, must be as it was: a learning rate is a number in a recorded call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distconv.capture.watch.values import same

Described = list[tuple[str, Any]]
"""What a step of an optimizer depends on, and what it is called; no values of tensors."""


class Optimizers:
    """Those that have taken a step, as they were before it."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[Optimizer, Described]] = {}

    @contextmanager
    def noted(self, refuse: Callable[[str], None]) -> Iterator[None]:
        """Inside, optimizers are found; then they are put back, and ``refuse`` is told of one that was changed."""
        before: dict[int, tuple[list[dict[str, Any]], dict[Any, dict[str, Any]]]] = {}

        def note(optimizer: Optimizer, *_: Any) -> None:
            if id(optimizer) not in self.found:
                self.found[id(optimizer)] = optimizer, _described(optimizer)
                state = {leaf: dict(kept) for leaf, kept in optimizer.state.items()}
                before[id(optimizer)] = [dict(group) for group in optimizer.param_groups], state

        hook = register_optimizer_step_pre_hook(note)
        try:
            yield
            changed = self.difference()
            if changed:
                refuse(f"{changed} after it: an optimizer makes its state in its first step, which is to be taken "
                       "without dc.capture, and schedules are to take theirs behind the captured one")  # fmt: skip
        finally:
            hook.remove()
            for key, (groups, state) in before.items():
                optimizer = self.found[key][0]
                for group, settings in zip(optimizer.param_groups, groups, strict=False):
                    group.update(settings)
                for leaf in [leaf for leaf in optimizer.state if leaf not in state]:
                    del optimizer.state[leaf]
                for leaf, kept in state.items():
                    optimizer.state[leaf].clear()
                    optimizer.state[leaf].update(kept)

    def difference(self) -> str:
        """Which of them is not as it was, and in what."""
        for optimizer, before in self.found.values():
            now = _described(optimizer)
            name = type(optimizer).__name__
            if len(now) != len(before):
                return f"{name} has other state or parameters"
            for (what, one), (_, other) in zip(now, before, strict=True):
                if not same(one, other):
                    shown = "" if isinstance(one, torch.Tensor) else f" ({other} before, {one} now)"
                    return f"{name}'s {what} is another{shown}"
        return ""


def _described(optimizer: Optimizer) -> Described:
    described: Described = []
    for group in optimizer.param_groups:
        described += [("parameter", leaf) for leaf in group["params"]]
        described += [(name, value) for name, value in group.items() if name != "params"]
        for leaf in group["params"]:
            described += optimizer.state.get(leaf, {}).items()
    return described
