"""Differentiable communication: pairs of a forward pass and its adjoint, on local blocks.

Every rank that holds a replica of a tensor has the full gradient of it, not a part that remains to be summed. From this
convention the backward passes follow:

=============================  ==========================================  =============================
function                       forward                                     backward
=============================  ==========================================  =============================
:func:`redistribute`           from one distribution to another            the opposite redistribution
:func:`gather_region`          halo exchange: get the needed box           :func:`reduce_scatter_region`
:func:`reduce_scatter_region`  reverse halo exchange: add at the owners    :func:`gather_region`
:func:`allreduce_sum`          all-reduce                                  identity
:func:`with_grad_allreduce`    identity                                    all-reduce
=============================  ==========================================  =============================

All of them are linear, and each backward pass is the forward pass of the adjoint, so derivatives of any order work.
Layers call these functions; the module does not depend on any layer. :mod:`.gradient_reduction` decides when the
gradient of a parameter is all-reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distconv.communication import agreement, gradient_reduction
from distconv.communication.exclusive import ReferenceCounts, count_references, is_uniquely_owned
from distconv.communication.transfer import TransferPlan, transfer_plan
from distconv.communication.transport import allreduce
from distconv.distribution import Distribution
from distconv.grid import ProcessGrid
from distconv.memory_format import new_empty
from distconv.process import call_stack
from distconv.process.profiling import section

SHARE = "_distconv_share"
"""Attribute of a gathered weight: the object that reduce-scatters its gradient (``distconv.parameters.weight_groups``).

Its ``take(gradient, grid, axes, node)`` returns False if it does not take a contribution; ``name`` is the weight's.
"""

_Applied = torch.autograd.function._SingleLevelFunction


def apply(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    """Call ``function.apply`` on local blocks.

    The check that :mod:`distconv.autograd.user_functions` adds to the Functions of users is skipped.

    Parameters
    ----------
    function : type
        A ``torch.autograd.Function``.
    *args
        Its arguments.

    Returns
    -------
    Tensor
        What its ``forward`` returns; for several results a tuple.
    """
    unchecked: Any = function if torch._C._are_functorch_transforms_active() else super(_Applied, function)
    result: torch.Tensor = unchecked.apply(*args)
    return result


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, plan: TransferPlan) -> torch.Tensor:
        ctx.plan = plan
        # If the gradient is undefined it is so on all ranks, since all of them record the same graph, those with an
        # empty block too. So all of them skip the messages of the backward pass.
        ctx.set_materialize_grads(False)
        with section("redistribute"):
            moved = plan.move(local, "redistribution")
        # On other ranks the result is a copy: changing it in place must not change the input on some ranks only.
        return moved.clone() if moved is local else moved

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return None if grad is None else apply(_Redistribute, grad, ctx.plan.reversed()), None


def redistribute(local: torch.Tensor, src: Distribution, dst: Distribution, shape: Sequence[int]) -> torch.Tensor:
    """Return this rank's block under another distribution. Collective: call on every rank.

    Parameters
    ----------
    local : Tensor
        This rank's block under ``src``.
    src, dst : Distribution
        Over one process grid.
    shape : sequence of int
        Global shape of the tensor.

    Returns
    -------
    Tensor
        This rank's block under ``dst``; ``local`` itself if the distributions are equal.

    References
    ----------
    Source: Dryden et al. 2019, III-C.
    """
    if src == dst:
        return local
    return apply(_Redistribute, local, transfer_plan(src, dst, tuple(shape)))


class _GatherRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, plan: TransferPlan) -> torch.Tensor:
        ctx.plan = plan
        with section("halo"):
            return plan.start(local, "halo exchange").finish()[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter_region(grad, ctx.plan), None


def gather_region(local: torch.Tensor, plan: TransferPlan) -> torch.Tensor:
    """Return the box that this rank needs, with values of other ranks. Collective: call on every rank.

    In backward the gradients of overlapping boxes are added at the owners.

    Parameters
    ----------
    local : Tensor
        This rank's block of ``plan.src``.
    plan : TransferPlan
        From owned blocks to needed boxes; made without ``ghosts``.

    Returns
    -------
    Tensor
        This rank's box of ``plan.dst``.

    References
    ----------
    Source: Dryden et al. 2019, III-A.
    """
    return apply(_GatherRegion, local, plan)


class _ReduceScatterRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, plan: TransferPlan) -> torch.Tensor:
        ctx.plan = plan
        total = new_empty(partial, plan.local_shape).zero_()
        with section("share_out"):
            return plan.start_accumulate([partial], partial, "reduce-scatter").finish(total)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_region(grad, ctx.plan), None


def reduce_scatter_region(partial: torch.Tensor, plan: TransferPlan) -> torch.Tensor:
    """Return the sum, on this rank's block, of the partial sums of all ranks. Collective: call on every rank.

    A reduce-scatter whose boxes may overlap in any way; the adjoint of :func:`gather_region`.

    Parameters
    ----------
    partial : Tensor
        This rank's partial sum on its box of ``plan.dst``.
    plan : TransferPlan
        From owned blocks to boxes; made without ``ghosts``.

    Returns
    -------
    Tensor
        This rank's block of ``plan.src``.
    """
    return apply(_ReduceScatterRegion, partial, plan)


class _AllreduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, grid: ProcessGrid, axes: tuple[str, ...], layer: str) -> torch.Tensor:
        ctx.grid, ctx.axes = grid, axes
        total = local.clone(memory_format=torch.contiguous_format)
        return allreduce(grid.comm(axes), total, f"sum over {','.join(axes)}{layer}")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return apply(_WithGradAllreduce, grad, ctx.grid, ctx.axes), None, None, None


def allreduce_sum(local: torch.Tensor, grid: ProcessGrid, axes: Sequence[str | None]) -> torch.Tensor:
    """Return the sum of a tensor over the ranks along some axes. Collective: call on every rank.

    Parameters
    ----------
    local : Tensor
        Of the same shape on these ranks.
    grid : ProcessGrid
        The process grid.
    axes : sequence of str or None
        Axes to sum over. None and axes with one part are ignored.

    Returns
    -------
    Tensor
        The sum, replicated along ``axes``; ``local`` itself if there is nothing to sum over.
    """
    split = grid.split_axes(axes)
    return apply(_AllreduceSum, local, grid, split, "") if split else local


class _WithGradAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grid: ProcessGrid, axes: tuple[str, ...]) -> torch.Tensor:
        ctx.grid, ctx.axes, ctx.leaves = grid, axes, (_leaf_or_none(x),)
        ctx.share = getattr(x, SHARE, None)
        ctx.layer = _describe_layer(ctx) if ctx.share is None else f" of {ctx.share.name!r}"
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        # With create_graph=True the sum itself must be recorded.
        deferrable = ctx.share is not None and not torch.is_grad_enabled()
        if deferrable and ctx.share.take(grad, ctx.grid, ctx.axes, ctx.next_functions[0][0]):
            return None, None, None
        # Counted here: in a function called from here, one more frame would refer to the gradient.
        counts = count_references(grad) if _can_defer(ctx, 0) else None
        return _reduce_grad(ctx, 0, grad, counts), None, None


class _BothWithGradAllreduce(torch.autograd.Function):
    """Both tensors in one node, for a layer's weight and bias: half as many autograd nodes."""

    @staticmethod
    def forward(
        ctx: Any, one: torch.Tensor, other: torch.Tensor, grid: ProcessGrid, axes: tuple[str, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.grid, ctx.axes, ctx.leaves = grid, axes, (_leaf_or_none(one), _leaf_or_none(other))
        ctx.layer = _describe_layer(ctx)
        # A tensor that is not used has no gradient, and its all-reduce is skipped on all ranks.
        ctx.set_materialize_grads(False)
        return one.view_as(one), other.view_as(other)

    @staticmethod
    def backward(
        ctx: Any, one: torch.Tensor | None, other: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        counts = count_references(one) if one is not None and _can_defer(ctx, 0) else None
        other_counts = count_references(other) if other is not None and _can_defer(ctx, 1) else None
        # The second one first, as autograd would run two separate nodes. The order decides which gradients share a
        # bucket, and so the order in which MPI adds, and the roundoff error.
        other_sum = _reduce_grad(ctx, 1, other, other_counts)
        return _reduce_grad(ctx, 0, one, counts), other_sum, None, None


def _describe_layer(ctx: Any) -> str:
    """Return the parameters' names, or the layer that is being called, for the order check in backward.

    In backward no module is on the call stack. Names of parameters are preferred, since finding the layer takes longer.
    """
    if not agreement.is_order_checked(ctx.grid.comm(ctx.axes)):
        return ""
    names = [gradient_reduction.parameter_name(leaf) for leaf in ctx.leaves]
    return f" of {', '.join(map(repr, names))}" if all(names) else call_stack.running_layer()


def _leaf_or_none(x: torch.Tensor) -> torch.Tensor | None:
    if not (x.is_leaf and x.requires_grad):
        return None
    gradient_reduction.check_not_in_ddp(x)
    return x


def _can_defer(ctx: Any, index: int) -> bool:
    """Return True if the gradient of input ``index`` may be summed later, during the rest of backward."""
    leaf = ctx.leaves[index]
    # With create_graph=True the sum itself must be recorded, so it cannot be deferred.
    if leaf is None or torch.is_grad_enabled():
        return False
    return gradient_reduction.can_defer(leaf, ctx.next_functions[index][0])


def _reduce_grad(
    ctx: Any, index: int, grad: torch.Tensor | None, counts: ReferenceCounts | None
) -> torch.Tensor | None:
    """Return the summed gradient of input ``index``; None if it is not required, or deferred.

    ``counts``: the reference counts of ``grad`` if the sum may be deferred, otherwise None.
    """
    if grad is None or not ctx.needs_input_grad[index]:
        return None
    if counts is None:
        return apply(_AllreduceSum, grad, ctx.grid, ctx.axes, ctx.layer)
    uniquely_owned = is_uniquely_owned(grad, counts)
    gradient_reduction.enqueue_contribution(
        ctx.leaves[index], grad, ctx.grid.comm(ctx.axes), uniquely_owned=uniquely_owned
    )
    return None


def with_grad_allreduce(x: torch.Tensor, grid: ProcessGrid, axes: Sequence[str | None]) -> torch.Tensor:
    """Return a replicated tensor unchanged; in backward its gradient is all-reduced over some axes.

    Use it for a tensor, such as a weight, that is identical on the ranks along ``axes`` while the work is split over
    these axes. Each rank then computes a contribution to the gradient. Collective in backward: call on every rank.

    Parameters
    ----------
    x : Tensor
        Identical on the ranks along ``axes``.
    grid : ProcessGrid
        The process grid.
    axes : sequence of str or None
        Exactly the axes over which the work is split. None and axes with one part are ignored.

    Returns
    -------
    Tensor
        A view of ``x``, or ``x`` itself if there is nothing to sum over.

    Warnings
    --------
    If ``axes`` misses an axis that splits the work, the gradient lacks contributions, and the ranks' parameters
    diverge. If ``axes`` has an axis that does not split the work, the gradient is too large by the number of its parts.
    """
    split = grid.split_axes(axes)
    return apply(_WithGradAllreduce, x, grid, split) if split else x


def both_with_grad_allreduce(
    one: torch.Tensor, other: torch.Tensor, grid: ProcessGrid, axes: Sequence[str | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two replicated tensors unchanged; in backward their gradients are all-reduced over some axes.

    As :func:`with_grad_allreduce` for each of them, such as a weight and its bias, with one autograd node.

    Parameters
    ----------
    one, other : Tensor
        Identical on the ranks along ``axes``.
    grid, axes
        As in :func:`with_grad_allreduce`.

    Returns
    -------
    tuple of Tensor
        Views of ``one`` and ``other``.
    """
    # As results of one node both would require a gradient, and an unneeded one would be computed.
    if one.requires_grad != other.requires_grad or hasattr(one, SHARE) or hasattr(other, SHARE):
        return with_grad_allreduce(one, grid, axes), with_grad_allreduce(other, grid, axes)
    split = grid.split_axes(axes)
    both: Any = apply(_BothWithGradAllreduce, one, other, grid, split) if split else (one, other)
    one, other = both
    return one, other
