"""What stays refused: functions that reach below values, where neither a block nor a gathered copy is the tensor.

Everything else without a rule of its own goes to the exact fallback.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch

from distconv.dispatch import implements, name_of
from distconv.errors import UnsupportedOperation
from distconv.tensor import DistTensor

_MANY = "the elements of a DistTensor lie on many ranks: use gather() for the whole or .local for this rank's block"

_REASONS = {
    "the memory of a DistTensor lies on many ranks: use .local for this rank's block": """
        data_ptr const_data_ptr untyped_storage storage storage_type _typed_storage is_set_to set_ _base.__get__
        __cuda_array_interface__.__get__ __dlpack__ __dlpack_device__ record_stream share_memory_ is_shared pin_memory
        is_pinned to_mkldnn _cdata.__get__
        """,
    "in torch the result depends on strides, which a DistTensor does not keep: use reshape, permute or slices": """
        as_strided_ dim_order _is_view
        """,
    "a DistTensor keeps its shape: use a new one, x = x[...] or F.pad(x, ...)": """
        resize resize_ resize_as resize_as_ resize_as_sparse_ sparse_resize_ sparse_resize_and_clear_
        """,
    _MANY: "__array_wrap__ __setstate__ module_load",
}


def _refuse(name: str, reason: str, *_: Any, **named: Any) -> NoReturn:
    raise UnsupportedOperation(f"{name}: {reason}")


def _functions(name: str) -> set[Any]:
    """What ``torch`` and tensors have under ``name``."""
    own, _, getter = name.partition(".")
    holders = (torch.Tensor, torch)
    found = {vars(torch.Tensor).get(own, vars(torch._C.TensorBase).get(own))} if getter else set()
    found |= set() if getter else {getattr(holder, own) for holder in holders if hasattr(holder, own)}
    return {function.__get__ if getter else function for function in found if function is not None}


for _reason, _names in _REASONS.items():
    for _name in _names.split():
        for _function in _functions(_name):
            implements(_function)(partial(_refuse, name_of(_function), _reason))


def _array(function: Any, input: DistTensor, *args: Any, **named: Any) -> Any:
    """``Tensor.numpy`` of what is whole on every rank, such as a loss."""
    if input.dist.split_axes:
        _refuse(name_of(function), _MANY)
    return function(input.local, *args, **named)


for _function in (torch.Tensor.numpy, torch.Tensor.__array__):
    implements(_function)(partial(_array, _function))
