"""``ScanRNN`` and ``ScanGRU``: torch's recurrent modules with another backward pass and the same parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .cells import CELLS
from .methods import Method, parse_method
from .stack import run_recurrent


class _BackwardMethodMode(TorchFunctionMode):
    """A mode in which torch's recurrent functions use ``method`` in backward.

    So torch's modules run with all of their checks.
    """

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
        return func(*args, **(kwargs or {})) if cell is None else run_recurrent(cell, self.method, *args)


_CELLS = {cell.function: cell for cell in CELLS.values()}


class _ScanRecurrent(nn.RNNBase):
    """The part that both modules add to torch's modules."""

    method: str

    def _set_method(self, method: str) -> None:
        parse_method(method)
        self.method = method

    def forward(self, input: Any, hx: torch.Tensor | None = None) -> Any:
        """Return the result of torch's module.

        Parameters
        ----------
        input : Tensor, PackedSequence or DistTensor
            A DistTensor may be split over samples and time.
        hx : Tensor, optional
            As in torch.
        """
        with _BackwardMethodMode(parse_method(self.method)):
            return super().forward(input, hx)

    def extra_repr(self) -> str:
        """Return the options that torch's module shows, and the method."""
        return f"{super().extra_repr()}, method={self.method!r}"


class ScanRNN(_ScanRecurrent, nn.RNN):
    """``nn.RNN`` (tanh or relu) whose backward pass through time uses a given method.

    Parameters
    ----------
    *args, **options
        As in ``nn.RNN``.
    method : {"auto", "autograd", "sequential", "blelloch", "truncated"}
        Values of :class:`~distconv.layers.recurrent.Method`, which describes them.

    Raises
    ------
    UnsupportedOperation
        If there is no such method.
    """

    def __init__(self, *args: Any, method: str = "auto", **options: Any) -> None:
        super().__init__(*args, **options)
        self._set_method(method)


class ScanGRU(_ScanRecurrent, nn.GRU):
    """``nn.GRU`` whose backward pass through time uses a given method.

    Parameters
    ----------
    *args, **options
        As in ``nn.GRU``.
    method : {"auto", "autograd", "sequential", "blelloch", "truncated"}
        Values of :class:`~distconv.layers.recurrent.Method`, which describes them.

    Raises
    ------
    UnsupportedOperation
        If there is no such method.
    """

    def __init__(self, *args: Any, method: str = "auto", **options: Any) -> None:
        super().__init__(*args, **options)
        self._set_method(method)
