"""Differentiable communication: pairs of a forward and its adjoint, on the local blocks.

Gradient convention: what is replicated over an axis has, on every replica, the whole gradient. So a sum over a split
axis has the identity as its adjoint, a redistribution has the opposite redistribution, and what enters split work
whole (a parameter) has its contributions summed over exactly the axes that split this work.

All of it is linear, and each backward pass is the forward pass of its adjoint: derivatives of any order go through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distconv.communication import agreement, gradient_reduction
from distconv.communication.exclusive import Holders, holders, is_exclusive
from distconv.communication.transfer import TransferPlan, transfer_plan
from distconv.communication.transport import allreduce
from distconv.distribution import Distribution
from distconv.grid import ProcessGrid
from distconv.process import call_stack
from distconv.process.profiling import section

_Applied = torch.autograd.function._SingleLevelFunction


def apply(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    """``function.apply`` of blocks, without the check of what users apply (distconv.autograd.user_functions)."""
    unchecked: Any = function if torch._C._are_functorch_transforms_active() else super(_Applied, function)
    result: torch.Tensor = unchecked.apply(*args)
    return result


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, plan: TransferPlan) -> torch.Tensor:
        ctx.plan = plan
        # A gradient that torch leaves undefined is so on all ranks: they take the same steps, of empty blocks, too.
        ctx.set_materialize_grads(False)
        with section("redistribute"):
            moved = plan.move(local, "redistribution")
        # Elsewhere it is a copy: changing the result must not change the input on some ranks only.
        return moved.clone() if moved is local else moved

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return None if grad is None else apply(_Redistribute, grad, ctx.plan.reversed()), None


def redistribute(local: torch.Tensor, src: Distribution, dst: Distribution, shape: Sequence[int]) -> torch.Tensor:
    """This rank's block under ``dst`` of a tensor of ``shape`` of which ``local`` is its block under ``src``.

    Source: Dryden et al. 2019, III-C.
    """
    if src == dst:
        return local
    return apply(_Redistribute, local, transfer_plan(src, dst, tuple(shape)))


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, plan: TransferPlan) -> torch.Tensor:
        ctx.plan = plan
        with section("halo"):
            return plan.start(local, "halo exchange").finish()[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return share_out(grad, ctx.plan), None


def assemble(local: torch.Tensor, plan: TransferPlan) -> torch.Tensor:
    """The box that this rank needs under ``plan.dst``, ghosts included; its adjoint adds up at the owners.

    Source: Dryden et al. 2019, III-A.
    """
    return apply(_Assemble, local, plan)


class _ShareOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, plan: TransferPlan) -> torch.Tensor:
        ctx.plan = plan
        total = share.new_zeros(plan.local_shape)
        with section("share_out"):
            return plan.start_accumulate([share], share, "sum of shares").finish(total)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return assemble(grad, ctx.plan), None


def share_out(share: torch.Tensor, plan: TransferPlan) -> torch.Tensor:
    """This rank's block of ``plan.src``, added up from the shares that ranks hold on their boxes of ``plan.dst``.

    A reduce-scatter over whatever the boxes are; the adjoint of :func:`assemble`.
    """
    return apply(_ShareOut, share, plan)


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, grid: ProcessGrid, axes: tuple[str, ...], layer: str) -> torch.Tensor:
        ctx.grid, ctx.axes = grid, axes
        total = local.clone(memory_format=torch.contiguous_format)
        return allreduce(grid.comm(axes), total, f"sum over {','.join(axes)}{layer}")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return apply(_Enter, grad, ctx.grid, ctx.axes), None, None, None


def sum_over(local: torch.Tensor, grid: ProcessGrid, axes: Sequence[str | None]) -> torch.Tensor:
    """Sum of ``local`` over the ranks along ``axes``; the result is replicated there."""
    split = grid.split_axes(axes)
    return apply(_SumOver, local, grid, split, "") if split else local


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, grid: ProcessGrid, axes: tuple[str, ...]) -> torch.Tensor:
        ctx.grid, ctx.axes, ctx.leaves = grid, axes, (_leaf(whole),)
        ctx.layer = _layer(ctx)
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, share: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        held = holders(share) if _defers(ctx, 0) else None
        return _summed(ctx, 0, share, held), None, None


class _EnterBoth(torch.autograd.Function):
    """Two at once, as the weight and the bias of a layer are: half as many nodes."""

    @staticmethod
    def forward(
        ctx: Any, one: torch.Tensor, other: torch.Tensor, grid: ProcessGrid, axes: tuple[str, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.grid, ctx.axes, ctx.leaves = grid, axes, (_leaf(one), _leaf(other))
        ctx.layer = _layer(ctx)
        # Of one that nobody has used there is no gradient, and nothing to sum.
        ctx.set_materialize_grads(False)
        return one.view_as(one), other.view_as(other)

    @staticmethod
    def backward(
        ctx: Any, one: torch.Tensor | None, other: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        held = holders(one) if one is not None and _defers(ctx, 0) else None
        held_other = holders(other) if other is not None and _defers(ctx, 1) else None
        # In the order of nodes of their own, which is that of buckets, and so of what MPI adds up in which order.
        later = _summed(ctx, 1, other, held_other)
        return _summed(ctx, 0, one, held), later, None, None


def _layer(ctx: Any) -> str:
    """Return parameters' names, or the layer that is being called, for the comparison of the order in backward.

    There no module is on the stack. Names of parameters are preferred since finding the layer takes longer.
    """
    if not agreement.is_order_checked(ctx.grid.comm(ctx.axes)):
        return ""
    names = [gradient_reduction.name_of(leaf) for leaf in ctx.leaves]
    return f" of {', '.join(map(repr, names))}" if all(names) else call_stack.running_layer()


def _leaf(whole: torch.Tensor) -> torch.Tensor | None:
    if not (whole.is_leaf and whole.requires_grad):
        return None
    gradient_reduction.check_not_in_ddp(whole)
    return whole


def _defers(ctx: Any, index: int) -> bool:
    """Whether the sum of that input's gradient may come later; one that is to be differentiated cannot wait."""
    leaf = ctx.leaves[index]
    if leaf is None or torch.is_grad_enabled():
        return False
    return gradient_reduction.defers(leaf, ctx.next_functions[index][0])


def _summed(ctx: Any, index: int, share: torch.Tensor | None, held: Holders | None) -> torch.Tensor | None:
    """The sum of a ``share`` of that input's gradient; None if nobody wants one, or if it comes later.

    ``held``: how often the share was held where autograd handed it over, if the sum may come later.
    """
    if share is None or not ctx.needs_input_grad[index]:
        return None
    if held is None:
        return apply(_SumOver, share, ctx.grid, ctx.axes, ctx.layer)
    exclusive = is_exclusive(share, held)
    gradient_reduction.defer(ctx.leaves[index], share, ctx.grid.comm(ctx.axes), exclusive=exclusive)
    return None


def enter(whole: torch.Tensor, grid: ProcessGrid, axes: Sequence[str | None]) -> torch.Tensor:
    """``whole``, equal on all ranks along ``axes``, as it enters work split over ``axes``.

    The adjoint sums the contributions over exactly these axes, so that each rank gets the whole gradient.
    """
    split = grid.split_axes(axes)
    return apply(_Enter, whole, grid, split) if split else whole


def enter_both(
    one: torch.Tensor, other: torch.Tensor, grid: ProcessGrid, axes: Sequence[str | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`enter` of two tensors at once, such as a layer's weight and its bias."""
    if one.requires_grad != other.requires_grad:  # both results would require a gradient, and it would be computed
        return enter(one, grid, axes), enter(other, grid, axes)
    split = grid.split_axes(axes)
    both: Any = apply(_EnterBoth, one, other, grid, split) if split else (one, other)
    one, other = both
    return one, other
