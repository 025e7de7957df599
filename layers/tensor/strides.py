"""``as_strided`` of gathered tensors.

The result depends on memory order. It is defined if the elements of the global tensor have one order in memory; then
the fallback computes it on gathered, contiguous tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from distconv.dispatch import OperatorKind, implements, name_of
from distconv.errors import NoRule, UnsupportedOperation
from distconv.tensor import DistTensor


def _as_strided(
    name: str, input: DistTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> NoReturn:
    """Raise NoRule, so that the fallback gathers, or UnsupportedOperation if the memory order is not defined."""
    _check_memory_order(name, input, size, stride, storage_offset)
    raise NoRule(f"{name} has no distributed rule: use slices, unfold, reshape or permute")


def _as_strided_scatter(name: str, input: DistTensor, src: torch.Tensor, *layout: Any, **named: Any) -> NoReturn:
    _as_strided(name, input, *layout, **named)


def _check_memory_order(
    name: str, input: DistTensor, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> None:
    """Raise UnsupportedOperation if the memory order of ``input`` is not defined, or if the view leaves it."""
    # The index of the last element that the view reaches. torch would read beyond the tensor in the storage.
    last = (offset or 0) + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if input._strides is not None or not (input.dist.split_axes or input.local.is_contiguous()):
        reason = "its elements are not in one order in memory"
    elif offset is not None and input._memory is not None:
        reason = "storage_offset counts from the memory of the source of a view; leave it out, or clone() first"
    elif last >= input.numel() and min(size, default=1) > 0:
        reason = f"it reaches element {last} of {input.numel()}"
    else:
        return
    raise UnsupportedOperation(
        f"{name} of a DistTensor of shape {tuple(input.shape)}: {reason}; use reshape, permute or slices"
    )


for _holder in (torch, torch.Tensor):
    for _name in ("as_strided", "as_strided_copy", "as_strided_scatter"):
        if hasattr(_holder, _name):
            _function = getattr(_holder, _name)
            _rule: Any = _as_strided_scatter if _name.endswith("scatter") else _as_strided
            implements(_function, kind=OperatorKind.VIEW, tensors="input src")(partial(_rule, name_of(_function)))
