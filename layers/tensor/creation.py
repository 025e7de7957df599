"""New tensors with the distribution of a DistTensor.

A new tensor is split along the dimensions that have the same size at the same index, and replicated otherwise. Random
numbers are drawn for the global tensor on every rank, so that they equal those of a single process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from distconv.dispatch import OperatorKind, implements
from distconv.errors import NoRule
from distconv.layers.common.alignment import as_distributed, matching_distribution, result_shape
from distconv.layers.common.inplace_views import record_inplace_change
from distconv.layers.common.random_state import check_same_generator_state
from distconv.layers.tensor.reshaping import sizes_from_arguments
from distconv.memory_order import empty_like_global
from distconv.tensor import DistTensor


def _new_of_size(function: Callable[..., torch.Tensor], input: DistTensor, *size: Any, **named: Any) -> DistTensor:
    """Compute ``Tensor.new_zeros``, ``new_ones`` or ``new_empty``."""
    shape = torch.Size(sizes_from_arguments(size or (named.pop("size"),)))
    return _new_blocks(function, input, shape, **named)


def _new_blocks(
    function: Callable[..., torch.Tensor], input: DistTensor, shape: torch.Size, *args: Any, **named: Any
) -> DistTensor:
    # torch's function is called on the block, so that dtype and device follow the input.
    dist = matching_distribution(input, shape)
    return DistTensor(function(input.local, dist.local_shape(shape), *args, **named), dist, shape)


for _name in ("new_zeros", "new_ones", "new_empty"):
    _function = getattr(torch.Tensor, _name)
    implements(_function, kind=OperatorKind.EFFECT)(partial(_new_of_size, _function))


@implements(torch.Tensor.new, kind=OperatorKind.EFFECT, tensors=None)
def new(input: DistTensor, *size: Any, **named: Any) -> DistTensor:
    """Compute ``Tensor.new`` of a size; in torch a tuple that is not a ``torch.Size`` holds values.

    Parameters
    ----------
    input, *size, **named
        As in ``Tensor.new``.

    Returns
    -------
    DistTensor

    Raises
    ------
    NoRule
        For values.
    """
    if not size or not (isinstance(size[0], torch.Size) or all(isinstance(n, int) for n in size)):
        raise NoRule("Tensor.new of values has no distributed rule: use new_tensor")
    return _new_of_size(torch.Tensor.new_empty, input, *size, **named)


@implements(torch.Tensor.new_full, kind=OperatorKind.EFFECT)
def new_full(input: DistTensor, size: Any, fill_value: float, **named: Any) -> DistTensor:
    """Compute ``Tensor.new_full`` block by block.

    Parameters
    ----------
    input, size, fill_value, **named
        As in ``Tensor.new_full``.

    Returns
    -------
    DistTensor
    """
    return _new_blocks(torch.Tensor.new_full, input, torch.Size(size), fill_value, **named)


@implements(torch.Tensor.new_tensor, kind=OperatorKind.EFFECT, tensors=None)
def new_tensor(input: DistTensor, data: Any, **named: Any) -> DistTensor:
    """Compute ``Tensor.new_tensor``: a replicated tensor.

    Parameters
    ----------
    input, data, **named
        As in ``Tensor.new_tensor``.

    Returns
    -------
    DistTensor
    """
    return as_distributed(input.local.new_tensor(data, **named), input.grid)


@implements(torch.Tensor.module_load, kind=OperatorKind.EFFECT, tensors=None)
def module_load(input: torch.Tensor, other: torch.Tensor, assign: bool = False) -> torch.Tensor:
    """Compute ``Tensor.module_load``: the tensor with which a module replaces a parameter that it loads.

    Parameters
    ----------
    input, other, assign
        As in ``Tensor.module_load``.

    Returns
    -------
    Tensor
    """
    if not isinstance(input, DistTensor):
        assert isinstance(other, DistTensor)
        plain: torch.Tensor = torch.Tensor.module_load(input, other.gather(), assign)  # type: ignore[no-untyped-call]
        return plain
    # A new object, because the module exchanges its parameter with it (torch.utils.swap_tensors).
    loaded = copy.deepcopy(input)
    with torch.no_grad():
        loaded.copy_(other)
    return loaded


# -- random numbers ---------------------------------------------------------------------------------------------------


def _draw_like(function: Callable[..., torch.Tensor], input: DistTensor, *args: Any, **named: Any) -> DistTensor:
    """Compute ``torch.rand_like`` or a variant: every rank draws the global tensor and keeps its block. Collective."""
    # If states differed, ranks would keep blocks of different global tensors, and replicas would diverge silently.
    check_same_generator_state(input, named.get("generator"))
    full = function(empty_like_global(input), *args, **named)
    return as_distributed(full, input.grid).redistribute(input.dist)


for _function in (torch.rand_like, torch.randn_like, torch.randint_like):
    implements(_function, kind=OperatorKind.EFFECT)(partial(_draw_like, _function))


@implements(torch.bernoulli, torch.Tensor.bernoulli, kind=OperatorKind.EFFECT)
def bernoulli(input: DistTensor, *args: Any, **named: Any) -> DistTensor:
    """Compute ``torch.bernoulli`` with the draws of a single process.

    Parameters
    ----------
    input, *args, **named
        As in ``torch.bernoulli``.

    Returns
    -------
    DistTensor
    """
    result_shape(torch.bernoulli, input)
    check_same_generator_state(input, named.get("generator"))
    # As in a single process, the input is part of the graph and gets a gradient of zeros.
    full = torch.bernoulli(torch.empty_like(empty_like_global(input)).copy_(input.gather()), *args, **named)
    return as_distributed(full, input.grid).redistribute(input.dist)


def _draw_in_place(function: Callable[..., torch.Tensor], input: DistTensor, *args: Any, **named: Any) -> DistTensor:
    """Compute ``Tensor.uniform_`` or a variant. Collective."""
    # Parameters of a distribution may be tensors, such as the probabilities of bernoulli_.
    plain = [a.gather() if isinstance(a, DistTensor) else a for a in args]
    input.local.copy_(_draw_like(function, input, *plain, **named).local)
    record_inplace_change(input)
    return input


for _name in "uniform_ normal_ bernoulli_ exponential_ random_ log_normal_ geometric_ cauchy_".split():
    _function = getattr(torch.Tensor, _name)
    implements(_function, kind=OperatorKind.EFFECT)(partial(_draw_in_place, _function))


@torch.no_grad()
def _initialize(function: Callable[..., torch.Tensor], tensor: DistTensor, *args: Any, **named: Any) -> DistTensor:
    """Compute ``torch.nn.init.uniform_`` or a variant for the global parameter. Collective."""
    return _draw_in_place(function, tensor, *args, **named)


for _name in ("uniform_", "normal_", "constant_", "kaiming_uniform_"):
    _function = getattr(torch.nn.init, _name)
    implements(_function, kind=OperatorKind.EFFECT)(partial(_initialize, _function))
