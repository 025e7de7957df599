"""Weights sharded over axes that would replicate them: gathered when a layer needs them (ZeRO, stage 3).

A rank keeps a block of each weight, of its gradient and of its optimizer state. Weights are gathered in groups: those
of one layer, or of several small ones. A group is

1. gathered before the forward pass of its first layer, which then sees the full weights;
2. freed when the forward pass reaches another group. Autograd saves references in place of its tensors;
3. gathered again when the backward pass reaches the output of one of its layers;
4. reduced when the backward pass reaches another group, or ends: gradients are summed by a reduce-scatter.

The group that followed the last time is gathered ahead, in forward and in backward. At most two groups are in memory.

Messages are matched by their order: all ranks must run the layers in the same order. The first operations are compared.

Source: Rajbhandari et al. 2020 (ZeRO), 5.3 (parameter partitioning) and 7.2.2 (its volume of messages).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from mpi4py import MPI
from torch.autograd.graph import Node

from distconv.communication import agreement
from distconv.communication.collectives import SHARE, apply, redistribute
from distconv.communication.transport import Exchange, Reduction
from distconv.distribution import Distribution, block_range
from distconv.grid import ProcessGrid
from distconv.memory_format import new_empty
from distconv.precision import accumulation_dtype
from distconv.process.profiling import section
from distconv.tensor import DistTensor

SENT_ALONE_BYTES = 64 << 10
"""Size of a weight from which its blocks are messages of their own, without copies into and out of a buffer."""

_SENDING = 4
"""Number of exchanges that peers may not have received: more would keep more memory."""

AXIS = "n"
"""Axis of the weights' own grid along which they are sharded."""


@dataclass(eq=False)
class ShardedWeight:
    """A weight of which each rank has a block."""

    name: str
    parameter: DistTensor
    """Split along one dimension over ``AXIS`` of its own grid, and perhaps along others over channels."""
    used: Distribution | None
    """The layout in which layers use it: None for a full plain tensor."""
    dim: int
    """The dimension that is split over ``AXIS``."""
    grid: ProcessGrid
    """The grid of the layer."""
    axes: tuple[str, ...]
    """The axes of ``grid`` over which the weight is sharded."""

    @property
    def local(self) -> torch.Tensor:
        """Return this rank's block, a leaf of autograd's graph."""
        return self.parameter.local

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the gathered tensor on this rank."""
        local = list(self.local.shape)
        local[self.dim] = self.parameter.shape[self.dim]
        return tuple(local)

    def part(self, full: torch.Tensor, index: int) -> torch.Tensor:
        """Return a view of the part of the gathered weight that a rank keeps.

        Parameters
        ----------
        full : Tensor
            The gathered weight, or its gradient.
        index : int
            The rank in the communicator of the group.

        Returns
        -------
        Tensor
        """
        indices = block_range(full.shape[self.dim], self.parameter.grid.shape[AXIS], index)
        return full.narrow(self.dim, indices.start, len(indices))


class WeightGroup:
    """Weights of some layers, which are gathered and reduced together.

    Parameters
    ----------
    weights : sequence of ShardedWeight
        Of one dtype, device and grid.
    gathered : GatheredGroups
        The groups of the model that are in memory.
    """

    def __init__(self, weights: Sequence[ShardedWeight], gathered: GatheredGroups) -> None:
        self.weights, self.gathered = list(weights), gathered
        self.comm: MPI.Intracomm = weights[0].parameter.grid.comm(AXIS)
        self._others = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        self.full: list[torch.Tensor] = []
        """The gathered tensors; empty while they are not in memory."""
        self.following: dict[bool, WeightGroup] = {}
        """The group that was needed after this one the last time, in forward (False) and in backward (True)."""
        self.gradients: dict[tuple[str, ...], dict[int, torch.Tensor]] = {}
        """This rank's contributions by number of the weight, for each set of further axes over which they are added."""
        self._exchange: Exchange | None = None
        self._finish: Callable[[], list[torch.Tensor]] | None = None
        """Returns the gathered tensors after the exchange."""
        self._versions: list[int] = []
        """Counts of the in-place changes of the blocks when they were gathered; empty if they were not."""

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightGroup:
        # The copy of a model has its own parameters on the same grids.
        weights = [replace(w, parameter=copy.deepcopy(w.parameter, memo)) for w in self.weights]
        return WeightGroup(weights, copy.deepcopy(self.gathered, memo))

    @property
    def what(self) -> str:
        """The weights, for errors and the watchdog's report."""
        return self.weights[0].name + (f" and {len(self.weights) - 1} more" if self.weights[1:] else "")

    # -- gathering ----------------------------------------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """True if the weights are gathered, or about to be, and have not changed since."""
        return bool(self._versions) and self._versions == [w.local._version for w in self.weights]

    def start_gather(self) -> None:
        """Start to gather the weights. Collective: call on every rank of the group's communicator."""
        self.drop()
        agreement.check_order(self.comm, f"gathering {self.what}")
        self._versions = [w.local._version for w in self.weights]
        # Not inference tensors, which a later training step could not use.
        with torch.inference_mode(False), torch.no_grad(), section("gather"):
            full = [new_empty(w.local, w.full_shape) for w in self.weights]
            blocks = [
                [w.part(tensor, rank) for w, tensor in zip(self.weights, full, strict=True)] for rank in self._others
            ]
            own = _pack_blocks([w.local for w in self.weights], full)
            received = [_Received(each, full) for each in blocks]
        sends = [(rank, message) for rank in self._others for message in own if message.numel()]
        receives = [
            (rank, message)
            for rank, each in zip(self._others, received, strict=True)
            for message in each.messages
            if message.numel()
        ]

        def finish() -> list[torch.Tensor]:
            for weight, tensor in zip(self.weights, full, strict=True):
                weight.part(tensor, self.comm.rank).copy_(weight.local)
            for each in received:
                each.unpack()
            return full

        self._finish = finish
        self._exchange = Exchange(self.comm, sends, receives, f"gathering {self.what}")

    def finish_gather(self) -> None:
        """Wait for the weights."""
        if self._exchange is None or self._finish is None:
            return
        self.gathered.wait_received(self._exchange)
        with torch.inference_mode(False), torch.no_grad(), section("gather"):
            self.full = self._finish()
        self._exchange = self._finish = None
        for index, full in enumerate(self.full):
            self.gathered.memory[full.untyped_storage().data_ptr()] = (self, index)

    def drop(self) -> None:
        """Free the gathered tensors; those that autograd works with are freed later."""
        if self._exchange is not None:  # gathered ahead, but not needed
            self._exchange.wait()
            self._exchange = self._finish = None
        for full in self.full:
            self.gathered.memory.pop(full.untyped_storage().data_ptr(), None)
        self.full, self._versions = [], []

    # -- use ----------------------------------------------------------------------------------------------------------

    def tensor(self, index: int) -> torch.Tensor:
        """Return a gathered weight as a layer uses it; its gradient arrives at the block."""
        weight, full = self.weights[index], self.full[index]
        if torch.is_grad_enabled() and weight.local.requires_grad:
            full = apply(_Gathered, weight.local, full, self, index)
            setattr(full, SHARE, _GradientShare(self, index))
        return full if weight.used is None else DistTensor(full, weight.used, weight.parameter.shape)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def add_gradient(self, index: int, gradient: torch.Tensor, axes: tuple[str, ...]) -> None:
        """Add this rank's contribution to the gradient of a weight.

        Parameters
        ----------
        index : int
            Number of the weight in the group.
        gradient : Tensor
            Of the shape of the gathered weight.
        axes : tuple of str
            Axes of the layer's grid over which it is summed in addition to those over which the weight is sharded.
        """
        gradients = self.gradients.setdefault(axes, {})
        before = gradients.get(index)
        # Not in place: autograd may use the memory of the first one elsewhere.
        gradients[index] = gradient if before is None else before + gradient
        self.gathered.add_pending(self)

    def start_reduce(self) -> Callable[[], None]:
        """Start to sum the contributions; the result adds the sums to the gradients. Collective."""
        pending = [self._start_reduce(axes, grads) for axes, grads in sorted(self.gradients.items())]
        self.gradients = {}

        def finish() -> None:
            for each in pending:
                each()

        return finish

    def _start_reduce(self, axes: tuple[str, ...], grads: dict[int, torch.Tensor]) -> Callable[[], None]:
        numbers = sorted(grads)
        what = f"sum of the gradients of {', '.join(self.weights[number].name for number in numbers)}"
        agreement.check_order(self.comm, what)
        weights, full = [self.weights[number] for number in numbers], [grads[number] for number in numbers]
        with section("pack"):
            wide = accumulation_dtype(weights[0].local.dtype)
            parts = [
                [w.part(grad, rank) for w, grad in zip(weights, full, strict=True)] for rank in range(self.comm.size)
            ]
            sent = {rank: [message.to(wide) for message in _pack_blocks(parts[rank], full)] for rank in self._others}
            own = [part.to(wide) for part in parts[self.comm.rank]]
            arriving = {rank: [torch.empty_like(part) for part in own] for rank in self._others}
            received = {rank: _Received(tensors, full) for rank, tensors in arriving.items()}
        sends = [(rank, message) for rank in self._others for message in sent[rank] if message.numel()]
        receives = [(rank, message) for rank in self._others for message in received[rank].messages if message.numel()]
        exchange = Exchange(self.comm, sends, receives, what)

        def finish() -> None:
            self.gathered.wait_received(exchange)
            for each in received.values():
                each.unpack()
            # By rank: the same order on every rank and in every run, so the same roundoff error.
            by_rank = [arriving.get(rank, own) for rank in range(self.comm.size)]
            totals = [_sum(tensors) for tensors in zip(*by_rank, strict=True)]
            if axes:
                comm = self.weights[0].grid.comm(axes)
                for reduction in [Reduction(comm, total, what) for total in totals if total.numel()]:
                    reduction.wait()
            for weight, total in zip(weights, totals, strict=True):
                _add_to_grad(weight.local, total)

        return finish


def _pack_blocks(tensors: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous messages with blocks of weights: one with all small ones, and one for each large one.

    ``full``: the gathered tensors, whose sizes decide, so that all ranks decide equally.
    """
    small = [each.reshape(-1) for each, whole in zip(tensors, full, strict=True) if not _is_sent_alone(whole)]
    large = [each.contiguous() for each, whole in zip(tensors, full, strict=True) if _is_sent_alone(whole)]
    return [*([torch.cat(small)] if small else []), *large]


def _is_sent_alone(full: torch.Tensor) -> bool:
    return full.numel() * full.element_size() >= SENT_ALONE_BYTES


class _Received:
    """Memory for messages of :func:`_pack_blocks`: blocks themselves, or buffers for those that are not contiguous."""

    def __init__(self, tensors: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> None:
        pairs = list(zip(tensors, full, strict=True))
        self._small = [tensor for tensor, whole in pairs if not _is_sent_alone(whole)]
        self._large = [tensor for tensor, whole in pairs if _is_sent_alone(whole)]
        flat = [tensors[0].new_empty(sum(each.numel() for each in self._small))] if self._small else []
        self.messages = flat + [each if each.is_contiguous() else each.new_empty(each.shape) for each in self._large]

    def unpack(self) -> None:
        """Copy what arrived in buffers to the blocks."""
        large = self.messages[1:] if self._small else self.messages
        if self._small:
            sizes = [tensor.numel() for tensor in self._small]
            for tensor, values in zip(self._small, self.messages[0].split(sizes), strict=True):
                tensor.copy_(values.view(tensor.shape))
        for tensor, message in zip(self._large, large, strict=True):
            if tensor is not message:
                tensor.copy_(message)


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of some tensors, in their order; at least two."""
    total = tensors[0] + tensors[1]
    for each in tensors[2:]:
        total += each
    return total


def _add_to_grad(block: torch.Tensor, total: torch.Tensor) -> None:
    """Add a sum, which nothing else uses, to ``.grad`` of a block."""
    with torch.no_grad():
        if block.grad is None:
            block.grad = total.to(block.dtype)
        else:
            block.grad += total.to(block.dtype)


class _Gathered(torch.autograd.Function):
    """A gathered weight as a function of this rank's block."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, full: torch.Tensor, group: WeightGroup, index: int) -> torch.Tensor:
        ctx.group, ctx.index = group, index
        ctx.set_materialize_grads(False)
        # Not a view, of which torch would reject changes in place with a message about views.
        return full.new_empty(0).set_(full)  # type: ignore[call-overload, no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        # The gradient of a full weight is complete on every rank, and each rank keeps a part of it. Its derivative with
        # respect to the full one is gathered.
        parameter = ctx.group.weights[ctx.index].parameter
        kept = redistribute(grad, parameter.dist.without([AXIS]), parameter.dist, parameter.shape)
        return kept, None, None, None


class _GradientShare:
    """Where the contributions to the gradient of a gathered weight go."""

    def __init__(self, group: WeightGroup, index: int) -> None:
        self._group, self._index = group, index

    @property
    def name(self) -> str:
        """Name of the weight."""
        return self._group.weights[self._index].name

    def take(self, gradient: torch.Tensor, grid: ProcessGrid, axes: tuple[str, ...], node: Node) -> bool:
        """Add a contribution that is to be summed over ``axes``, or return False if it must be summed at once.

        ``node``: the node of the gathered weight.
        """
        weight = self._group.weights[self._index]
        local = weight.local
        # Ranks along an axis that does not split the work have equal contributions, which must not be added.
        if grid != weight.grid or not set(weight.axes) <= set(axes):
            return False
        if local._backward_hooks or getattr(local, "_post_accumulate_grad_hooks", None):
            return False
        try:
            if not torch._C._will_engine_execute_node(node.next_functions[0][0]):  # type: ignore[arg-type]
                return False
        except RuntimeError:  # torch raises it for leaves under torch.autograd.grad
            return False
        self._group.add_gradient(self._index, gradient, tuple(axis for axis in axes if axis not in weight.axes))
        return True


# -- the groups of a model that are in memory -------------------------------------------------------------------------


class GatheredGroups:
    """The groups of a model that are gathered: the one in use, and the one that is gathered ahead."""

    def __init__(self) -> None:
        self.memory: dict[int, tuple[WeightGroup, int]] = {}
        """Group and number of each gathered weight, by the address of its memory."""
        self._current: WeightGroup | None = None
        self._backward = False
        """True if the last group was needed in backward. Otherwise it was in forward."""
        self._ahead: WeightGroup | None = None
        self._reducing: list[Callable[[], None]] = []
        self._is_running = False
        """True during a forward pass of the model, or a backward pass."""
        self._sending: list[Exchange] = []
        """Exchanges whose messages may not have been received yet. The weights do not change during a pass."""
        self._task = -1
        """Number of autograd's graph task whose end completes the gradients."""
        self._pending: dict[WeightGroup, None] = {}
        """Groups that have contributions, in the order of their first one."""

    def __deepcopy__(self, memo: object) -> GatheredGroups:
        return GatheredGroups()

    def begin_forward(self) -> None:
        """Begin a forward pass of the model: its first group does not follow the last one of another pass."""
        self._discard_pass()
        self._is_running = True

    def _discard_pass(self) -> None:
        """Discard what a pass has left that has ended, perhaps by an error."""
        self._drop_all()
        self._is_running, self._task = False, -1
        self.complete_sends()
        for group in self._pending:
            group.gradients = {}
        self._pending, self._reducing = {}, []

    def end_forward(self) -> None:
        """End a forward pass of the model, after which its weights may change."""
        self._is_running = False
        self.complete_sends()

    def wait_received(self, exchange: Exchange) -> None:
        """Wait for the messages of an exchange, and during a pass not until the peers have received theirs."""
        if not self._is_running:
            exchange.wait()
        elif not exchange.wait_received():
            self._sending.append(exchange)
            if len(self._sending) > _SENDING:
                self._sending.pop(0).wait()

    def complete_sends(self) -> None:
        """Wait until the peers have received all messages."""
        while self._sending:
            self._sending.pop(0).wait()

    def _drop_all(self) -> None:
        for group in (self._current, self._ahead):
            if group is not None:
                group.drop()
        self._current = self._ahead = None

    def add_pending(self, group: WeightGroup) -> None:
        """Register a group that has contributions to gradients, which the end of the pass reduces at the latest."""
        self.in_backward()
        self._pending[group] = None

    def acquire(self, group: WeightGroup) -> None:
        """Gather a group, and free the others. Collective: call on every rank of the model."""
        backward = torch._C._current_graph_task_id() != -1  # True also while a checkpointed block is recomputed
        if backward:
            self.in_backward()
        elif self._task != -1:  # a backward pass has failed
            self._discard_pass()
        if group is self._current and backward == self._backward and group.is_current:
            return
        if self._current is not None and self._current is not group and backward == self._backward:
            self._current.following[backward] = group
        if backward and self._current is not None and self._current is not group:
            self._start_reduce(self._current)
        if not group.is_current:
            group.start_gather()
        group.finish_gather()
        for other in (self._current, self._ahead):
            if other is not None and other is not group:
                other.drop()
        self._current, self._backward = group, backward
        self._ahead = group.following.get(backward)
        if self._ahead is group:
            self._ahead = None
        if self._ahead is not None:
            self._ahead.start_gather()

    def in_backward(self) -> None:
        """Complete the gradients at the end of the running backward pass."""
        task = torch._C._current_graph_task_id()
        if task != self._task:  # also in a pass within a pass, as in checkpointing
            self._task, self._is_running = task, True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _start_reduce(self, group: WeightGroup) -> None:
        # One group at a time: more would keep more memory.
        while self._reducing:
            self._reducing.pop(0)()
        self._pending.pop(group, None)
        self._reducing.append(group.start_reduce())

    def _end_backward(self) -> None:
        for group in list(self._pending):
            self._start_reduce(group)
        while self._reducing:
            self._reducing.pop(0)()
        self._drop_all()
        self._task, self._is_running = -1, False
        self.complete_sends()
