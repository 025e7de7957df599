"""Recording of a running model: calls of its modules and of torch functions.

:mod:`.tracing`, the layer timing, the memory of stale weights and the sparse cost model derive recorders from it.
"""

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
    """Call functions before and after each forward pass of some of a model's modules.

    Parameters
    ----------
    model : Module
        Model that runs inside the ``with`` block.
    before : callable
        Called as ``before(name, module, (args, kwargs))``.
    after : callable
        Called as ``after(result)``.
    among : callable, optional
        ``among(name, module)`` returns True for modules to observe. Default: all.

    Yields
    ------
    None
        The hooks are removed when the block ends.
    """
    hooks = []
    for name, module in model.named_modules():
        if among(name, module):
            hooks.append(
                # name=name binds the name now: a closure would read the last one of the loop.
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
    """Mode that intercepts calls of torch functions and keeps track of the running modules.

    Subclasses override ``__torch_function__``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: list[tuple[str, torch.nn.Module]] = []
        """Running modules with their names, the outermost first. A module that raises stays in the list."""
        self.kept: list[Any] = []
        """Tensors whose ids are keys. They are kept alive so that no id is used twice."""

    @property
    def running_module(self) -> str:
        """Name of the innermost running module; empty outside of all modules."""
        return self.running[-1][0] if self.running else ""

    @contextmanager
    def record_modules(self, model: torch.nn.Module) -> Iterator[None]:
        """Record the forward passes of ``model`` that run inside the ``with`` block."""
        with (
            module_calls(
                model,
                lambda name, module, arguments: self.running.append((name, module)),
                lambda result: self.running.pop() and None,
            ),
            self,
        ):
            yield
