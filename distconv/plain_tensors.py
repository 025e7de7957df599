"""Calls in which torch dispatches on a plain tensor although a DistTensor takes part.

torch's setters of ``data``, ``real`` and ``imag``, and DLPack capsules, read the memory of any tensor. A DistTensor has
none, and the process would crash. Here a plain tensor is replicated, as everywhere, and receives the full tensor. Other
calls reach a DistTensor below torch's function interface, as ``aten`` operators.

distconv applies the patches that are declared here when it starts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch

from distconv.dispatch import OperatorKind, call_fallback, implements
from distconv.errors import NoRule, UnsupportedOperation
from distconv.process import patches
from distconv.tensor import DistTensor

_TORCH_ATTRIBUTES = vars(torch._C.TensorBase)
_SET_DATA = _TORCH_ATTRIBUTES["data"].__set__


@implements(_SET_DATA, kind=OperatorKind.EFFECT, tensors=None)
def assign_data(*_: Any) -> None:
    """Reject ``plain.data = x``.

    Raises
    ------
    NoRule
        Always, so that the fallback gathers ``x`` and assigns the full tensor.
    """
    raise NoRule(
        "assigning a DistTensor to the data of a plain tensor, which is replicated: assign to a slice of a distributed "
        "tensor (x.new_zeros(...)), or assign dc.gather(x)"
    )


def _set_data(tensor: torch.Tensor, value: Any) -> None:
    if isinstance(value, DistTensor):
        # By the registry, as torch would if its setter dispatched on the value.
        DistTensor.__torch_function__(_SET_DATA, (DistTensor,), (tensor, value))
    else:
        _SET_DATA(tensor, value)


def _part_setter(name: str) -> Callable[[torch.Tensor, Any], None]:
    """Return the setter of ``real`` or ``imag``."""

    def call(tensor: torch.Tensor, value: Any) -> None:
        if isinstance(tensor, DistTensor) or isinstance(value, DistTensor):
            getattr(tensor, name)[...] = value
        else:
            _TORCH_ATTRIBUTES[name].__set__(tensor, value)

    return call


class _PatchedAttribute:
    """An attribute of tensors with another setter. Access through the class returns torch's own descriptor."""

    def __init__(self, own: Any, setter: Callable[[torch.Tensor, Any], None]) -> None:
        self._own, self._setter, self._getter = own, setter, own.__get__

    def __get__(self, tensor: Any, kind: Any = None) -> Any:
        return self._own if tensor is None else self._getter(tensor)

    def __set__(self, tensor: torch.Tensor, value: Any) -> None:
        self._setter(tensor, value)

    def __delete__(self, tensor: torch.Tensor) -> None:
        self._own.__delete__(tensor)


for _name, _setter in (("data", _set_data), ("real", _part_setter("real")), ("imag", _part_setter("imag"))):
    patches.declare(
        torch.Tensor,
        _name,
        _PatchedAttribute(_TORCH_ATTRIBUTES[_name], _setter),
        "plain tensors take DistTensors as values",
    )


_torch_to_dlpack = torch._C._to_dlpack


@wraps(_torch_to_dlpack)
def _to_dlpack(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # __dlpack__ of a DistTensor raises, as it does if NumPy or CuPy call it.
    return tensor.__dlpack__() if isinstance(tensor, DistTensor) else _torch_to_dlpack(tensor, *args, **kwargs)


for _holder, _name in ((torch._C, "_to_dlpack"), (torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack")):
    patches.declare(_holder, _name, _to_dlpack, "a DistTensor has no memory that a capsule could lend")


# -- below torch's function interface ---------------------------------------------------------------------------------

_ATEN = torch.ops.aten


@implements(_ATEN._local_scalar_dense.default, kind=OperatorKind.EFFECT, tensors=None)
def as_number(tensor: DistTensor) -> Any:
    """Return the value of ``tensor`` where torch expects a number: ``torch.full((2,), x)``, ``torch.arange(x)``.

    Collective: call on every rank.

    Parameters
    ----------
    tensor : DistTensor
        DistTensor of one element.

    Returns
    -------
    object
    """
    return tensor.item()


@implements(_ATEN.detach.default, kind=OperatorKind.EFFECT, tensors=None)
def copy_to_plain(tensor: DistTensor) -> torch.Tensor:
    """Return the plain tensor that ``torch.tensor(loss)`` copies.

    Parameters
    ----------
    tensor : DistTensor
        DistTensor of one element.

    Returns
    -------
    Tensor

    Raises
    ------
    UnsupportedOperation
        If ``tensor`` is split.
    """
    if tensor.dist.split_axes:
        raise UnsupportedOperation(
            "torch.tensor(x), new_tensor(x), Variable(x) and nested_tensor([x]) of a split DistTensor x: use "
            "x.detach().clone(), or dc.gather(x)"
        )
    return tensor.local.detach()


@implements(_ATEN.alias.default, kind=OperatorKind.EFFECT, tensors=None)
def reject_wrapping(tensor: DistTensor) -> NoReturn:
    """Reject ``torch.Tensor(x)`` and ``torch.Tensor.as_subclass(x, ...)``.

    Parameters
    ----------
    tensor : DistTensor
        DistTensor that torch would take for a plain tensor.

    Raises
    ------
    UnsupportedOperation
        Always.
    """
    raise UnsupportedOperation(
        "torch.Tensor(x), torch.FloatTensor(x) and torch.Tensor.as_subclass(x, ...) of a DistTensor x: use x itself, "
        "x.as_subclass(...), or dc.gather(x)"
    )


@implements(_ATEN.set_.source_Tensor, kind=OperatorKind.EFFECT, tensors=None)
def set_memory(tensor: torch.Tensor, source: DistTensor) -> torch.Tensor:
    """Call ``plain.set_(x)`` through the fallback, which gathers ``x``.

    Parameters
    ----------
    tensor : Tensor
        Plain tensor, which is changed.
    source : DistTensor
        DistTensor whose full values it gets.

    Returns
    -------
    Tensor
    """
    reason = NoRule("set_ of a plain tensor to a DistTensor: assign to a slice of a distributed one (x.new_zeros(...))")
    result: torch.Tensor = call_fallback(reason, _ATEN.set_.source_Tensor, (tensor, source), {})
    return result
