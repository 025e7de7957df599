"""Memory formats of blocks: contiguous, channels_last or channels_last_3d.

Kernels of convolution and pooling compute in the format of their operands, and a copy of an activation into another
format costs as much time as a small layer. So every function that allocates a block gives it the format of the block
that it is made from. Strides of the *global* tensor are the concern of :mod:`distconv.memory_order`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

FORMATS = ("contiguous", "channels_last")
"""Names of memory formats in options and files."""

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The format ``channels_last`` of tensors with so many dimensions."""


def named_format(name: str, dims: int) -> torch.memory_format:
    """Return the memory format of tensors with so many dimensions.

    Parameters
    ----------
    name : str
        One of ``FORMATS``.
    dims : int
        Number of dimensions. Only images (4) and volumes (5) have a channels_last format.

    Returns
    -------
    torch.memory_format
    """
    return torch.contiguous_format if name == FORMATS[0] else CHANNELS_LAST.get(dims, torch.contiguous_format)


def convert_weights(model: torch.nn.Module, name: str) -> None:
    """Convert the parameters of a model to a memory format.

    ``Module.to`` raises if a model has weights of both 2-D and 3-D convolutions.

    Parameters
    ----------
    model : torch.nn.Module
        Model, whose parameters are changed in place.
    name : str
        One of ``FORMATS``.
    """
    for weight in model.parameters():
        weight.data = weight.data.contiguous(memory_format=named_format(name, weight.dim()))


def memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format of a tensor; of a view that is not dense, that of the tensor that it is a view of.

    Parameters
    ----------
    tensor : Tensor
        Plain tensor of any number of dimensions.

    Returns
    -------
    torch.memory_format
        ``torch.contiguous_format`` for a contiguous tensor, also if it could be described as channels_last.

    Examples
    --------
    >>> x = torch.empty(2, 3, 4, 5, memory_format=torch.channels_last)
    >>> memory_format(x), memory_format(x[:, :, 1:]), memory_format(x.contiguous())
    (torch.channels_last, torch.channels_last, torch.contiguous_format)
    """
    if tensor.dim() not in (4, 5) or tensor.is_contiguous():
        return torch.contiguous_format
    return torch._prims_common.suggest_memory_format(tensor)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without gaps or repeated elements in memory, in its memory format; a copy only if it has some.

    Parameters
    ----------
    tensor : Tensor
        Plain tensor, such as a view or an expanded gradient.

    Returns
    -------
    Tensor
    """
    return tensor.contiguous(memory_format=memory_format(tensor))


def new_empty(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return an uninitialized tensor of ``shape`` with the dtype, device and memory format of ``like``.

    Parameters
    ----------
    like : Tensor
        Has as many dimensions as ``shape``, if it is not contiguous.
    shape : sequence of int
        Size of each dimension.

    Returns
    -------
    Tensor
    """
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=memory_format(like))
