"""Nested inputs and outputs of stages: their tensors, the structure around these, and the call of the next stage."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from distconv.errors import ShapeError
from distconv.layers.sparse import SparseTensor

CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype)
"""Types that stages may exchange besides tensors."""


class Leaf(Enum):
    """Marks in a structure."""

    TENSOR = "tensor"
    """Position of a tensor."""
    FLAT = "flat"
    """Structure of a single tensor, a tuple of several tensors, or gradients."""


class Boundary(NamedTuple):
    """Tensors at the boundary of two stages, and the structure around them.

    Attributes
    ----------
    tensors : list of Tensor or None
        None for a missing gradient.
    structure : object
        Nested value with ``Leaf.TENSOR`` in place of each tensor, or ``Leaf.FLAT``.
    """

    tensors: list[Any]
    structure: Any = Leaf.FLAT

    def value(self) -> Any:
        """Return the nested value."""
        if self.structure is not Leaf.FLAT:
            leaves, spec = tree_flatten(self.structure)
            tensors = iter(self.tensors)
            return tree_unflatten([next(tensors) if leaf is Leaf.TENSOR else leaf for leaf in leaves], spec)
        return self.tensors[0] if len(self.tensors) == 1 else tuple(self.tensors)


def flatten(value: Any, what: str) -> Boundary:
    """Return the tensors of a nested value, and its structure.

    Parameters
    ----------
    value : object
        Tensor, or a nested value of tuples, lists, dictionaries and other containers of torch's pytrees.
    what : str
        Description of the value, with which errors begin.

    Returns
    -------
    Boundary

    Raises
    ------
    TypeError
        If the value contains something else than tensors and :data:`CONSTANTS`.
    """
    if isinstance(value, torch.Tensor):
        return Boundary([value])
    leaves, spec = tree_flatten(value, is_leaf=lambda each: isinstance(each, SparseTensor))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if type(value) is tuple and len(value) > 1 and all(isinstance(each, torch.Tensor) for each in value):
        return Boundary(tensors)
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *CONSTANTS)):
            raise TypeError(
                f"{what} contains a {type(leaf).__name__}; use tensors, None, numbers and strings, in tuples, lists "
                "and dictionaries"
            )
    marked = [Leaf.TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return Boundary(tensors, tree_unflatten(marked, spec))


def call_arguments(module: nn.Module, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which a stage is called.

    A tuple or list becomes the positional arguments and a dictionary the keyword arguments, if the signature accepts
    them. Any other value is the only argument.

    Parameters
    ----------
    module : Module
        Its signature is that of ``forward``, or its attribute ``__signature__``.
    value : object
        Result of the stage before, or the input of a mini-batch.

    Returns
    -------
    args : tuple
    kwargs : dict
    """
    if isinstance(value, (tuple, list)):
        args, kwargs = tuple(value), {}
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        args, kwargs = (), dict(value)
    else:
        return (value,), {}
    signature = getattr(module, "__signature__", None) or inspect.signature(module.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return (value,), {}
    return args, kwargs


def count_samples(call: str, **values: Any) -> int:
    """Return the number of samples of the parts of a mini-batch.

    Parameters
    ----------
    call : str
        Method with which errors begin.
    **values : object
        Nested values by the name of the argument. Each tensor (N, ...) has the samples first; tensors without
        dimensions and other values belong to all samples.

    Returns
    -------
    int

    Raises
    ------
    ShapeError
        If a value is not supported, or the numbers of samples are zero or differ.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in values.items():
        try:
            tensors = flatten(value, f"{call}: {name}").tensors
        except TypeError as error:
            raise ShapeError(str(error)) from None
        nested = not isinstance(value, torch.Tensor)
        shapes |= {f"{name}[{i}]" if nested else name: tuple(tensor.shape) for i, tensor in enumerate(tensors)}
        if not tensors and not shapes:
            raise ShapeError(f"{call}: {name} is a {type(value).__name__} without tensors; pass samples as tensors")
    # A tensor without dimensions belongs to all samples only inside of a container.
    counts = {shape[0] if shape else 0 for name, shape in shapes.items() if shape or name in values}
    if len(counts) != 1 or 0 in counts:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ShapeError(f"{call}: {listed}: tensors must have the same number of samples as first size, one or more")
    return counts.pop()


def split_samples(value: Any, count: int) -> list[Any]:
    """Return micro-batches of a nested value, of balanced sizes.

    Parameters
    ----------
    value : object
        As in :func:`count_samples`.
    count : int
        Number of micro-batches.

    Returns
    -------
    list of object
    """
    leaves, spec = tree_flatten(value)
    pieces = [
        leaf.tensor_split(count) if isinstance(leaf, torch.Tensor) and leaf.dim() else (leaf,) * count
        for leaf in leaves
    ]
    return [tree_unflatten([piece[index] for piece in pieces], spec) for index in range(count)]
