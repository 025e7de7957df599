"""Functions that access memory, which are not supported, and conversions to and from NumPy.

Neither a block nor a gathered copy can replace the tensor for functions that access memory. All other functions without
an operator are handled by the fallback. ``numpy`` and ``Tensor._base`` are supported in part.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch

from distconv.dispatch import OperatorKind, call_fallback, functions_named, implements, name_of
from distconv.errors import NoRule, UnsupportedOperation
from distconv.layers.common.alignment import as_distributed
from distconv.tensor import DistTensor

_REASONS = {
    "the memory of a DistTensor lies on many ranks: use .local for this rank's block": """
        data_ptr const_data_ptr untyped_storage storage storage_type _typed_storage is_set_to set_
        __cuda_array_interface__.__get__ __dlpack__ __dlpack_device__ record_stream share_memory_ is_shared pin_memory
        to_mkldnn _cdata.__get__
        """,
    "in torch the result depends on strides, which a DistTensor does not have: use reshape, permute or slices": """
        as_strided_ dim_order _is_view
        """,
    "a DistTensor cannot be resized: create a new one, x = x[...] or F.pad(x, ...)": """
        resize resize_ resize_as resize_as_ resize_as_sparse_ sparse_resize_ sparse_resize_and_clear_
        """,
    "the elements of a DistTensor lie on many ranks: use gather() for all elements or .local for this rank's block": """
        __setstate__
        """,
}
"""The reason with a suggested fix, and the names of the functions."""


def _raise_unsupported(name: str, reason: str, *_: Any, **named: Any) -> NoReturn:
    raise UnsupportedOperation(f"{name}: {reason}")


def _functions_or_getters(name: str) -> set[Any]:
    """Return the functions, or the getter, of ``torch`` and of tensors with this name."""
    # "name.__get__" stands for the getter of a property, which is what the dispatcher receives.
    attribute, _, getter = name.partition(".")
    if not getter:
        return functions_named(attribute, torch.Tensor, torch)
    descriptor = vars(torch.Tensor).get(attribute, vars(torch._C.TensorBase).get(attribute))
    return set() if descriptor is None else {descriptor.__get__}


for _reason, _names in _REASONS.items():
    for _name in _names.split():
        for _function in _functions_or_getters(_name):
            implements(_function, kind=OperatorKind.QUERY, tensors=None)(
                partial(_raise_unsupported, name_of(_function), _reason)
            )


# -- NumPy ------------------------------------------------------------------------------------------------------------


def _read_only_array(function: Any, full: torch.Tensor, *args: Any, **named: Any) -> Any:
    """Return a gathered array that cannot be written, because writes would not reach the blocks."""
    array = function(full, *args, **named)
    array.flags.writeable = False
    return array


def _to_numpy(function: Any, of_full: Any, input: DistTensor, *args: Any, **named: Any) -> Any:
    """Compute ``Tensor.numpy``; a split tensor is gathered, and the array is read-only."""
    if not input.dist.split_axes:
        return function(input.local, *args, **named)
    reason = NoRule(
        f"{name_of(function)} of a split DistTensor has no distributed rule: compute with torch's functions, or "
        "gather it once (dc.gather(x))"
    )
    return call_fallback(reason, of_full, (input, *args), named)


for _function in (torch.Tensor.numpy, torch.Tensor.__array__):
    implements(_function, kind=OperatorKind.QUERY, tensors=None)(
        partial(_to_numpy, _function, partial(_read_only_array, _function))
    )


@implements(torch.Tensor.__array_wrap__, kind=OperatorKind.QUERY, tensors=None)
def array_wrap(input: DistTensor, array: Any, *_: Any) -> DistTensor:
    """Return the result of a NumPy function as a DistTensor, split as the input if it has its shape.

    Parameters
    ----------
    input, array, *_
        As in ``torch.Tensor.__array_wrap__``.

    Returns
    -------
    DistTensor
    """
    wrapped = as_distributed(torch.from_numpy(array), input.grid)
    return wrapped.redistribute(input.dist) if wrapped.shape == input.shape else wrapped


class _Plain:
    """A plain tensor that the fallback returns as it is."""

    def __init__(self, tensor: torch.Tensor, cls: type[torch.Tensor]) -> None:
        self.tensor = tensor.as_subclass(cls)


@implements(torch.Tensor.as_subclass, kind=OperatorKind.EFFECT, tensors=None)
def as_subclass(input: DistTensor, cls: type[torch.Tensor]) -> torch.Tensor:
    """Compute ``Tensor.as_subclass`` of the gathered tensor. The result is plain, and a copy unless nothing is split.

    A block cannot be the instance: the methods of the class would take it for the full tensor.

    Parameters
    ----------
    input, cls
        As in ``torch.Tensor.as_subclass``.

    Returns
    -------
    Tensor
    """
    reason = NoRule(
        f"torch.Tensor.as_subclass({cls.__name__}) of a DistTensor, whose result is the full tensor: compute with "
        "DistTensors (in MONAI: monai.data.set_track_meta(False)), or gather once (dc.gather(x))"
    )
    result: _Plain = call_fallback(reason, _Plain, (input, cls), {})
    return result.tensor


# -- the source of a view ---------------------------------------------------------------------------------------------


@implements(vars(torch._C.TensorBase)["_base"].__get__, kind=OperatorKind.QUERY)
def base(input: DistTensor) -> torch.Tensor | None:
    """Return ``Tensor._base``, if it is known.

    Raises
    ------
    UnsupportedOperation
        For a tensor that shares memory with another one, either of which may be the view.
    """
    # A view that was moved knows its source. As in torch, the base of a view of a view is the first source.
    if input._view is not None:
        source: DistTensor = input._view.source
        return source if source._view is None else base(source)
    if input._memory is not None:
        raise UnsupportedOperation(
            "Tensor._base: the DistTensor shares its memory with another one, and either of them may be the view"
        )
    return None
