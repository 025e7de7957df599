"""What a model calls while it runs: its modules, and the torch functions inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def module_calls(
    model: torch.nn.Module,
    before: Callable[[str, torch.nn.Module, Any], None],
    after: Callable[[Any], None],
    among: Callable[[str, torch.nn.Module], bool] = lambda name, module: True,
) -> Iterator[None]:
    """Call ``before(name, module, arguments)`` and ``after(result)`` where modules ``among`` those of the model run."""
    hooks = []
    for name, module in model.named_modules():
        if among(name, module):
            hooks.append(
                module.register_forward_pre_hook(
                    lambda module, args, kwargs, name=name: before(name, module, (args, kwargs)), with_kwargs=True
                )
            )
            hooks.append(module.register_forward_hook(lambda module, args, result: after(result)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class FunctionRecorder(TorchFunctionMode):
    """A mode that sees the calls of torch functions, and knows in which module they are."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[tuple[str, torch.nn.Module]] = []
        """The modules that run, with their names; the outermost first."""
        self.kept: list[Any] = []
        """What was seen, so that no id is used twice."""

    @property
    def place(self) -> str:
        """The name of the innermost module that is running."""
        return self.running[-1][0] if self.running else ""

    @contextmanager
    def inside(self, model: torch.nn.Module) -> Iterator[None]:
        """Record what ``model`` does."""
        with (
            module_calls(
                model,
                lambda name, module, arguments: self.running.append((name, module)),
                lambda result: self.running.pop() and None,
            ),
            self,
        ):
            yield
