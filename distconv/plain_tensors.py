"""Plain tensors that are given a distributed one, or made of one, by ways on which torch does not ask that.

torch's setters of ``data``, ``real`` and ``imag``, and DLPack's capsules, take any tensor for one with memory; a
DistTensor has none, and the process would die. As everywhere, a plain tensor is whole on every rank and gets the whole.
Other ways lead below torch's function interface, to its ``aten`` operators.

The patches declared here are applied when distconv starts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch

from distconv.dispatch import Kind, fallback, implements
from distconv.errors import NoRule, UnsupportedOperation
from distconv.process import patches
from distconv.tensor import DistTensor

_OWN = vars(torch._C.TensorBase)
_SET_DATA = _OWN["data"].__set__


@implements(_SET_DATA, kind=Kind.EFFECT, tensors=None)
def assign_data(*_: Any) -> None:
    """``plain.data = x``.

    Raises
    ------
    NoRule
        Always: the exact fallback assigns the whole.
    """
    raise NoRule(
        "assigning a DistTensor to the data of a plain tensor, which is whole on every rank: assign to a part of a "
        "distributed one (x.new_zeros(...)), or assign dc.gather(x)"
    )


def _set_data(tensor: torch.Tensor, value: Any) -> None:
    if isinstance(value, DistTensor):
        DistTensor.__torch_function__(_SET_DATA, (DistTensor,), (tensor, value))
    else:
        _SET_DATA(tensor, value)


def _part_setter(name: str) -> Callable[[torch.Tensor, Any], None]:
    """The setter of ``real`` or ``imag``."""

    def call(tensor: torch.Tensor, value: Any) -> None:
        if isinstance(tensor, DistTensor) or isinstance(value, DistTensor):
            getattr(tensor, name)[...] = value
        else:
            _OWN[name].__set__(tensor, value)

    return call


class _Attribute:
    """An attribute of tensors with another setter; to whoever asks the class it is torch's own."""

    def __init__(self, own: Any, setter: Callable[[torch.Tensor, Any], None]) -> None:
        self._own, self._setter, self._getter = own, setter, own.__get__

    def __get__(self, tensor: Any, kind: Any = None) -> Any:
        return self._own if tensor is None else self._getter(tensor)

    def __set__(self, tensor: torch.Tensor, value: Any) -> None:
        self._setter(tensor, value)

    def __delete__(self, tensor: torch.Tensor) -> None:
        self._own.__delete__(tensor)


for _name, _setter in (("data", _set_data), ("real", _part_setter("real")), ("imag", _part_setter("imag"))):
    patches.declare(torch.Tensor, _name, _Attribute(_OWN[_name], _setter), "plain tensors take DistTensors as values")


_capsule = torch._C._to_dlpack


@wraps(_capsule)
def _to_dlpack(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # A DistTensor refuses, as where NumPy or CuPy ask for it.
    return tensor.__dlpack__() if isinstance(tensor, DistTensor) else _capsule(tensor, *args, **kwargs)


for _holder, _name in ((torch._C, "_to_dlpack"), (torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack")):
    patches.declare(_holder, _name, _to_dlpack, "a DistTensor has no memory that a capsule could lend")


# -- below torch's function interface ---------------------------------------------------------------------------------

_ATEN = torch.ops.aten


@implements(_ATEN._local_scalar_dense.default, kind=Kind.EFFECT, tensors=None)
def as_number(tensor: DistTensor) -> Any:
    """Its value, where torch expects a number: ``torch.full((2,), x)``, ``torch.arange(x)``."""
    return tensor.item()


@implements(_ATEN.detach.default, kind=Kind.EFFECT, tensors=None)
def copied(tensor: DistTensor) -> torch.Tensor:
    """What ``torch.tensor(loss)`` copies.

    Raises
    ------
    UnsupportedOperation
        If it is split.
    """
    if tensor.dist.split_axes:
        raise UnsupportedOperation(
            "torch.tensor(x), new_tensor(x), Variable(x) and nested_tensor([x]) of a split DistTensor x: use "
            "x.detach().clone(), or dc.gather(x)"
        )
    return tensor.local.detach()


@implements(_ATEN.alias.default, kind=Kind.EFFECT, tensors=None)
def wrapped(tensor: DistTensor) -> NoReturn:
    """What ``torch.Tensor(x)`` and ``as_subclass`` make.

    Raises
    ------
    UnsupportedOperation
        Always.
    """
    raise UnsupportedOperation(
        "torch.Tensor(x), torch.FloatTensor(x) and x.as_subclass(...) of a DistTensor x: use x itself, or "
        "dc.gather(x); for MONAI's transforms, which make a MetaTensor, call monai.data.set_track_meta(False)"
    )


@implements(_ATEN.set_.source_Tensor, kind=Kind.EFFECT, tensors=None)
def set_memory(tensor: torch.Tensor, source: DistTensor) -> torch.Tensor:
    """``plain.set_(x)``."""
    reason = NoRule("set_ of a plain tensor to a DistTensor: assign to a part of a distributed one (x.new_zeros(...))")
    moved: torch.Tensor = fallback(reason, _ATEN.set_.source_Tensor, (tensor, source), {})
    return moved
