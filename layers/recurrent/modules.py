"""``ScanRNN`` and ``ScanGRU``: torch's recurrent modules with another backward pass, parameters and all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .cells import CELLS
from .methods import Method, method_named
from .stack import called


class _Through(TorchFunctionMode):
    """Inside, torch's recurrent functions go back through time by ``method``: the modules call them with all checks."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        cell = _CELLS.get(func)
        return func(*args, **(kwargs or {})) if cell is None else called(cell, self.method, *args)


_CELLS = {cell.function: cell for cell in CELLS.values()}


class _Scanned(nn.RNNBase):
    """What both modules add to torch's."""

    method: str

    def _go_back_by(self, method: str) -> None:
        method_named(method)
        self.method = method

    def forward(self, input: Any, hx: torch.Tensor | None = None) -> Any:
        """What torch's module gives, for tensors, packed sequences, and DistTensors split in samples and time."""
        with _Through(method_named(self.method)):
            return super().forward(input, hx)

    def extra_repr(self) -> str:
        """What torch's module shows, and the method."""
        return f"{super().extra_repr()}, method={self.method!r}"


class ScanRNN(_Scanned, nn.RNN):
    """``nn.RNN`` (tanh or relu) that goes back through time by ``method``: see :class:`~.methods.Method`.

    Raises
    ------
    UnsupportedOperation
        If there is no such method.
    """

    def __init__(self, *args: Any, method: str = "auto", **options: Any) -> None:
        super().__init__(*args, **options)
        self._go_back_by(method)


class ScanGRU(_Scanned, nn.GRU):
    """``nn.GRU`` that goes back through time by ``method``: see :class:`~.methods.Method`.

    Raises
    ------
    UnsupportedOperation
        If there is no such method.
    """

    def __init__(self, *args: Any, method: str = "auto", **options: Any) -> None:
        super().__init__(*args, **options)
        self._go_back_by(method)
