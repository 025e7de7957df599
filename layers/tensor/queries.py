"""Properties of tensors that are not tensors.

The answers are identical on all ranks. Queries about values communicate; queries about the layout describe the global
tensor as a single process would have it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from distconv.dispatch import OperatorKind, implements
from distconv.memory_order import contiguous_strides, empty_like_global
from distconv.tensor import DistTensor


@implements(torch.equal, torch.Tensor.equal, kind=OperatorKind.QUERY, tensors="input other")
def equal(input: torch.Tensor, other: torch.Tensor) -> bool:
    """Compute ``torch.equal`` of all elements.

    Parameters
    ----------
    input, other
        As in ``torch.equal``.

    Returns
    -------
    bool
    """
    return input.shape == other.shape and bool((input == other).all())


@implements(torch.allclose, torch.Tensor.allclose, kind=OperatorKind.QUERY, tensors="input other")
def allclose(
    input: torch.Tensor, other: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """Compute ``torch.allclose`` of all elements.

    Parameters
    ----------
    input, other, rtol, atol, equal_nan
        As in ``torch.allclose``.

    Returns
    -------
    bool
    """
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


@implements(torch.is_nonzero, torch.Tensor.is_nonzero, kind=OperatorKind.QUERY)
def is_nonzero(input: DistTensor) -> bool:
    """Compute ``torch.is_nonzero`` of the gathered element."""
    return torch.is_nonzero(input.replicated().local)


@implements(torch.Tensor.__contains__, kind=OperatorKind.QUERY, tensors=None)
def contains(input: DistTensor, element: Any) -> bool:
    """Compute ``element in x`` on all ranks.

    Parameters
    ----------
    input, element
        As in ``torch.Tensor.__contains__``.

    Returns
    -------
    bool
    """
    return bool((input == element).any())


@implements(torch.Tensor.__index__, kind=OperatorKind.QUERY)
def index(input: DistTensor) -> int:
    """Return the value of an integer tensor where Python requires an index.

    Raises
    ------
    TypeError
        If it is not an integer of one element, with torch's message.
    """
    if input.is_floating_point() or input.numel() != 1:
        raise TypeError("only integer tensors of a single element can be converted to an index")
    return int(input)


@implements(torch.result_type, kind=OperatorKind.QUERY, tensors=None)
def result_type(*operands: Any) -> torch.dtype:
    """Compute ``torch.result_type`` from shapes and dtypes."""
    plain = [torch.empty(o.shape, dtype=o.dtype, device="meta") if isinstance(o, torch.Tensor) else o for o in operands]
    return torch.result_type(*plain)


@implements(torch.is_same_size, torch.Tensor.is_same_size, kind=OperatorKind.QUERY, tensors="input other")
def is_same_size(input: torch.Tensor, other: torch.Tensor) -> bool:
    """Compute ``torch.is_same_size`` of global shapes.

    Parameters
    ----------
    input, other
        As in ``torch.is_same_size``.

    Returns
    -------
    bool
    """
    return input.shape == other.shape


@implements(torch.Tensor.stride, kind=OperatorKind.QUERY)
def stride(input: DistTensor, dim: int | None = None) -> Any:
    """Compute ``Tensor.stride`` of the global tensor, as in a single process.

    Parameters
    ----------
    input, dim
        As in ``Tensor.stride``.

    Returns
    -------
    int or tuple of int
    """
    # None, the usual case, stands for contiguous.
    strides = input._strides or contiguous_strides(tuple(input.shape))
    return strides if dim is None else strides[dim]


@implements(torch.Tensor.is_contiguous, kind=OperatorKind.QUERY)
def is_contiguous(input: DistTensor, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    """Compute ``Tensor.is_contiguous`` of the global tensor, as in a single process.

    Parameters
    ----------
    input, memory_format
        As in ``Tensor.is_contiguous``.

    Returns
    -------
    bool
    """
    if input._strides is None and memory_format is torch.contiguous_format:
        return True
    return empty_like_global(input, device="meta").is_contiguous(memory_format=memory_format)


@implements(torch.Tensor.storage_offset, kind=OperatorKind.QUERY)
def storage_offset(input: DistTensor) -> int:
    """Return ``Tensor.storage_offset`` of the global tensor, which is 0."""
    return 0


@implements(torch.Tensor.type, kind=OperatorKind.QUERY)
def type_(input: DistTensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    """Compute ``Tensor.type``: the name of the type, or a conversion of the block.

    Parameters
    ----------
    input, dtype, non_blocking
        As in ``Tensor.type``.

    Returns
    -------
    str or DistTensor
    """
    converted = input.local.type() if dtype is None else input.local.type(dtype, non_blocking)
    return converted if isinstance(converted, str) else DistTensor(converted, input.dist, input.shape)


@implements(vars(torch._C.TensorBase)["output_nr"].__get__, kind=OperatorKind.QUERY)
def output_nr(input: DistTensor) -> int:
    """Return ``Tensor.output_nr`` of the block: the index of the result of its ``grad_fn``."""
    return int(input.local.output_nr)


@implements(vars(torch._C.TensorBase)["_version"].__get__, kind=OperatorKind.QUERY)
def version(input: DistTensor) -> int:
    """Return ``Tensor._version`` of the block, which grows with each in-place change."""
    return int(input.local._version)


@implements(vars(torch._C.TensorBase)["retains_grad"].__get__, kind=OperatorKind.QUERY)
def retains_grad(input: DistTensor) -> bool:
    """Return ``Tensor.retains_grad`` of the block."""
    return bool(input.local.retains_grad)


def _block_property(function: Any, input: DistTensor) -> Any:
    """Return a property that all blocks have in common."""
    return function(input.local)


# Set by the operators that all ranks call, so no communication is needed.
for _name in ("is_inference", "is_coalesced", "is_distributed", "is_pinned", "is_conj", "is_neg"):
    for _function in {getattr(h, _name) for h in (torch, torch.Tensor) if hasattr(h, _name)}:
        implements(_function, kind=OperatorKind.QUERY)(partial(_block_property, _function))
