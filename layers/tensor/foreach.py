"""``torch._foreach_*`` and fused optimizers, which process lists of parameters.

Optimizers and gradient clipping call them. Each tensor is processed by its own operator. Plain (replicated) and
distributed parameters may be mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

from distconv.communication.transport import allreduce
from distconv.dispatch import OperatorKind, implements
from distconv.layers.common.alignment import as_distributed
from distconv.layers.common.inplace_views import record_inplace_change
from distconv.process import patches
from distconv.tensor import DistTensor, to_distribution

_NAMES = """
abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round rsqrt
sigmoid sign sin sinh sqrt tan tanh trunc add sub mul div pow clamp_min clamp_max maximum minimum addcmul addcdiv lerp
""".split()
"""Functions ``torch._foreach_<name>``, which exist out of place and in place."""

_SINGLE_NAMES = {"maximum": "clamp_min", "minimum": "clamp_max"}
"""Names of the single-tensor functions that also take numbers and work in place."""


def _element(value: Any, i: int, count: int) -> Any:
    """Return element ``i`` of a list, or of a tensor with one number for each tensor; otherwise ``value``."""
    if isinstance(value, (list, tuple)):
        return value[i]
    if isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) == count:
        return value[i].item()
    return value


def _operand_for(value: Any, target: Any) -> Any:
    """Return ``value`` as an operand for a plain ``target``: the local tensor of a replicated DistTensor."""
    if isinstance(value, DistTensor) and not isinstance(target, DistTensor) and not value.dist.split_axes:
        return value.local
    return value


def _call_each(function: Callable[..., Any], ternary: bool, *operands: Any, **options: Any) -> list[Any]:
    """Call ``function`` on the first elements of all lists, on the second ones, and so on."""
    count = next(len(operand) for operand in operands if isinstance(operand, (list, tuple)))
    results = []
    for i in range(count):
        first, *rest = (_element(operand, i, count) for operand in operands)
        # addcmul and addcdiv take their factor by name only, but their foreach versions also by position.
        extra = {"value": rest.pop()} if ternary and len(rest) == 3 else {}
        results.append(function(first, *(_operand_for(value, first) for value in rest), **extra, **options))
    return results


def _call_each_in_place(function: Callable[..., Any], ternary: bool, *operands: Any, **options: Any) -> None:
    _call_each(function, ternary, *operands, **options)


for _name in _NAMES:
    _single, _ternary = _SINGLE_NAMES.get(_name, _name), _name.startswith("addc")
    implements(getattr(torch, f"_foreach_{_name}"), kind=OperatorKind.EFFECT, tensors=None)(
        partial(_call_each, getattr(torch, _single), _ternary)
    )
    _in_place = partial(_call_each_in_place, getattr(torch.Tensor, f"{_single}_"), _ternary)
    implements(getattr(torch, f"_foreach_{_name}_"), kind=OperatorKind.EFFECT, tensors=None)(_in_place)
for _name in ("copy_", "zero_"):
    implements(getattr(torch, f"_foreach_{_name}"), kind=OperatorKind.EFFECT, tensors=None)(
        partial(_call_each_in_place, getattr(torch.Tensor, _name), False)
    )


@implements(torch._foreach_norm, kind=OperatorKind.EFFECT)
def norms(self: Sequence[torch.Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Compute ``torch._foreach_norm`` tensor by tensor.

    Parameters
    ----------
    self, ord, dtype
        As in ``torch._foreach_norm``.

    Returns
    -------
    list of Tensor
    """
    return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in self]


@implements(torch._amp_foreach_non_finite_check_and_unscale_, kind=OperatorKind.EFFECT, tensors=None)
def unscale(self: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Multiply gradients by ``inv_scale``, and set ``found_inf`` if any rank has a non-finite gradient.

    ``GradScaler`` calls it.

    Parameters
    ----------
    self, found_inf, inv_scale
        As in ``torch._amp_foreach_non_finite_check_and_unscale_``.
    """
    blocks = [tensor.local if isinstance(tensor, DistTensor) else tensor for tensor in self]
    torch._amp_foreach_non_finite_check_and_unscale_(blocks, found_inf, inv_scale)
    grid = next(tensor.grid for tensor in self if isinstance(tensor, DistTensor))
    # All ranks must skip the step, or none: otherwise their parameters diverge.
    allreduce(grid.world, found_inf, "check for infinite gradients", MPI.MAX)


def _fused_update(function: Callable[..., Any], *lists: Any, **options: Any) -> None:
    """Call a fused optimizer on blocks, with its state distributed as the parameters are.

    Fused optimizers update each element independently.
    """
    parameters = lists[0]

    def block_for(value: Any, like: torch.Tensor) -> Any:
        if isinstance(like, DistTensor):
            # Step counts have another shape than the parameter, and stay as they are.
            is_full = isinstance(value, torch.Tensor) and value.shape == like.shape
            return to_distribution(value, like.dist).local if is_full else value
        return value.gather() if isinstance(value, DistTensor) else value

    def blocks(values: Any) -> Any:
        # Lists of another length are not lists of one value for each parameter (empty: an option that is off).
        if not isinstance(values, (list, tuple)) or len(values) != len(parameters):
            return values
        return [block_for(value, like) for value, like in zip(values, parameters, strict=True)]

    function(*map(blocks, lists), **{name: blocks(value) for name, value in options.items()})
    # The function has changed blocks, without the operators that record changes for views of them.
    for parameter in parameters:
        if isinstance(parameter, DistTensor):
            record_inplace_change(parameter)


for _name in ("sgd", "adam", "adamw", "adagrad"):
    _function = getattr(torch, f"_fused_{_name}_")
    implements(_function, kind=OperatorKind.EFFECT, tensors=None)(partial(_fused_update, _function))


def _orthogonalize_full(orthogonalize: Any, grad: torch.Tensor, *options: Any) -> torch.Tensor:
    """Call Muon's iteration on gathered matrices, as in a single process, because it rounds to bfloat16 repeatedly."""
    if not isinstance(grad, DistTensor):
        return orthogonalize(grad, *options)  # type: ignore[no-any-return]
    return as_distributed(orthogonalize(grad.replicated().local, *options), grad.grid).redistribute(grad.dist)


_muon: Any = getattr(torch.optim, "_muon", None)
if _muon is not None:  # since torch 2.9
    _iterated = partial(_orthogonalize_full, _muon._zeropower_via_newtonschulz)
    patches.declare(_muon, "_zeropower_via_newtonschulz", _iterated, "it rounds to bfloat16 between products")
