"""Unsupported functions, which access memory.

Neither a block nor a gathered copy can replace the tensor for them. All other functions without an operator are
handled by the fallback.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch

from distconv.dispatch import OperatorKind, call_fallback, implements, name_of
from distconv.errors import NoRule, UnsupportedOperation
from distconv.layers.common.alignment import as_distributed
from distconv.tensor import DistTensor

_REASONS = {
    "the memory of a DistTensor lies on many ranks: use .local for this rank's block": """
        data_ptr const_data_ptr untyped_storage storage storage_type _typed_storage is_set_to set_
        __cuda_array_interface__.__get__ __dlpack__ __dlpack_device__ record_stream share_memory_ is_shared pin_memory
        to_mkldnn _cdata.__get__
        """,
    "in torch the result depends on strides, which a DistTensor does not keep: use reshape, permute or slices": """
        as_strided_ dim_order _is_view
        """,
    "a DistTensor keeps its shape: use a new one, x = x[...] or F.pad(x, ...)": """
        resize resize_ resize_as resize_as_ resize_as_sparse_ sparse_resize_ sparse_resize_and_clear_
        """,
    "the elements of a DistTensor lie on many ranks: use gather() for the whole or .local for this rank's block": """
        __setstate__
        """,
}
"""The reason with a suggested fix, and the names of the functions."""


def _refuse(name: str, reason: str, *_: Any, **named: Any) -> NoReturn:
    raise UnsupportedOperation(f"{name}: {reason}")


def _functions(name: str) -> set[Any]:
    """Return the functions of ``torch`` and of tensors that are called ``name``."""
    own, _, getter = name.partition(".")
    holders = (torch.Tensor, torch)
    functions = {vars(torch.Tensor).get(own, vars(torch._C.TensorBase).get(own))} if getter else set()
    functions |= set() if getter else {getattr(holder, own) for holder in holders if hasattr(holder, own)}
    return {function.__get__ if getter else function for function in functions if function is not None}


for _reason, _names in _REASONS.items():
    for _name in _names.split():
        for _function in _functions(_name):
            implements(_function, kind=OperatorKind.QUERY, tensors=None)(partial(_refuse, name_of(_function), _reason))


# -- NumPy ------------------------------------------------------------------------------------------------------------


def _read_only(function: Any, whole: torch.Tensor, *args: Any, **named: Any) -> Any:
    """Return a gathered array that cannot be written, because writes would not reach the blocks."""
    array = function(whole, *args, **named)
    array.flags.writeable = False
    return array


def _array(function: Any, of_whole: Any, input: DistTensor, *args: Any, **named: Any) -> Any:
    """Compute ``Tensor.numpy``; a split tensor is gathered, and the array is read-only."""
    if not input.dist.split_axes:
        return function(input.local, *args, **named)
    reason = NoRule(
        f"{name_of(function)} of a split DistTensor: compute with torch's functions, or gather it once (dc.gather(x))"
    )
    return call_fallback(reason, of_whole, (input, *args), named)


for _function in (torch.Tensor.numpy, torch.Tensor.__array__):
    implements(_function, kind=OperatorKind.QUERY, tensors=None)(
        partial(_array, _function, partial(_read_only, _function))
    )


@implements(torch.Tensor.__array_wrap__, kind=OperatorKind.QUERY, tensors=None)
def array_wrap(input: DistTensor, array: Any, *_: Any) -> DistTensor:
    """Return the result of a NumPy function as a DistTensor, split as the input if it has its shape.

    Parameters as in torch.
    """
    wrapped = as_distributed(torch.from_numpy(array), input.grid)
    return wrapped.redistribute(input.dist) if wrapped.shape == input.shape else wrapped


# -- what it is a view of ---------------------------------------------------------------------------------------------


@implements(vars(torch._C.TensorBase)["_base"].__get__, kind=OperatorKind.QUERY)
def base(input: DistTensor) -> torch.Tensor | None:
    """Return ``Tensor._base``, if it is known.

    Raises
    ------
    UnsupportedOperation
        For a tensor that shares memory with another one, either of which may be the view.
    """
    if input._view is not None:
        source: DistTensor = input._view.source
        return source if source._view is None else base(source)
    if input._memory is not None:
        raise UnsupportedOperation("Tensor._base of a DistTensor that shares its memory: which is the view is not kept")
    return None
