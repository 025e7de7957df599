"""Time of one operation under one distribution, and of redistributions.

:class:`.StepModel` calls :class:`OperationCosts` for every candidate of a layer. It determines the order of operations
and the overlap of all-reduces.

A halo leaves strips at the sides of a block: outputs that depend on received rows. The interior is the rest, which a
convolution can compute while the exchange is in flight.

Source: Dryden et al. 2019, V-A (FP, BPx, BPw, BPa and halo exchanges) and V-B (all-to-all redistribution).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import NamedTuple

from distconv.parameters.gathered_layers import GROUP_BYTES
from distconv.parameters.sharded_axes import sharded_axes
from distconv.perfmodel.cost.assumptions import Settings
from distconv.perfmodel.cost.block_geometry import AxisParts, axes_of, local_shape, redistribution, widest_halo
from distconv.perfmodel.cost.operation_work import LocalCall, Work, local_call, work
from distconv.perfmodel.graph.graph import Operation, Value
from distconv.perfmodel.machine.distributed_gemm import GemmTime, distributed_gemm
from distconv.perfmodel.machine.machine import Machine

SPATIAL = ("d", "h", "w")

STRIDED = 2.0
"""Time of a copy between blocks relative to one of contiguous memory (measured on CPUs: 1.5 to 3)."""


class ParameterBytes(NamedTuple):
    """Bytes of an operation's parameters on a rank.

    Attributes
    ----------
    held : float
        Parameters, or the largest blocks of those that are sharded.
    gathered : float
        Full parameters that are gathered from such blocks; 0 if none is sharded.
    """

    held: float
    gathered: float


def sharded_bytes(op: Operation, call: LocalCall, parts: AxisParts, sharded: str | bool) -> ParameterBytes:
    """Return the bytes of an operation's trained parameters on a rank.

    Parameters
    ----------
    op : Operation
        The operation.
    call : LocalCall
        The same operation on one rank.
    parts : AxisParts
        Grid of its deciding layer.
    sharded : str or bool
        Axes over which its weights are sharded, as :func:`.sharded_axes` takes them.

    Returns
    -------
    ParameterBytes
    """
    shards = parts.group(sharded_axes(parts, sharded)).ranks
    held = gathered = 0.0
    for shape, constant in zip(call.constants, op.constants, strict=True):
        if not constant.trained:
            continue
        size = float(math.prod(shape) * constant.itemsize)
        # A parameter is sharded along its longest dimension that channels do not split; a vector over c is not.
        longest = max((here for here, full in zip(shape, constant.shape, strict=True) if here == full), default=1)
        if shards == 1 or longest == 1:
            held += size
        else:
            held += size * math.ceil(longest / shards) / longest
            gathered += size
    return ParameterBytes(held, gathered)


def _interior(strips: list[list[float]]) -> tuple[float, int]:
    """Return the fraction of a block that needs no halo, and the number of sides with a halo."""
    return math.prod(max(0.0, 1 - sum(shares)) for shares in strips), sum(len(shares) for shares in strips)


@dataclass(frozen=True, kw_only=True)
class OperationCost:
    """Seconds of one operation in one training step.

    Overlapped communication is included in each field except ``forward`` and ``backward``.

    Source: Dryden et al. 2019, V-A.

    Attributes
    ----------
    fp, bpx, bpw : float
        Forward, backward-data and backward-weights computation.
    bpa : float
        Gradient all-reduce. It is queued after ``backward``, because gradients are complete when an operator returns
        them.
    halo_forward, halo_backward : float
        Exchanges of halos and channels.
    sync_forward, sync_backward : float
        Reductions that the computation waits for, such as those of batch norm.
    update : float
        Optimizer.
    forward, backward : float
        Elapsed time of the forward and the backward pass, without ``bpa`` and ``gather``.
    gather : float
        One gather of sharded weights. There are two in a step: in the forward and in the backward pass.
    """

    fp: float
    bpx: float
    bpw: float
    bpa: float
    halo_forward: float
    halo_backward: float
    sync_forward: float
    sync_backward: float
    update: float
    forward: float
    backward: float
    gather: float


class OperationCosts:
    """Costs of operations on the ranks of a machine, each computed once.

    Parameters
    ----------
    machine : Machine
    ranks : int
        Number of ranks.
    settings : Settings
    """

    def __init__(self, machine: Machine, ranks: int, settings: Settings) -> None:
        self.machine = machine
        self.ranks = ranks
        self.settings = settings
        self.overlap_halo = machine.overlap.halo if settings.overlap is None else settings.overlap
        self.overlap_allreduce = machine.overlap.allreduce if settings.overlap is None else settings.overlap
        self._rank = machine.computing(ranks)
        self._operations: dict[tuple[Operation, AxisParts, str | bool], OperationCost] = {}
        self._shuffles: dict[tuple[tuple[int, ...], int, AxisParts, AxisParts], float] = {}

    def compute(self, call: LocalCall, phase: str, fraction: float = 1.0, pieces: int = 1) -> float:
        """Return the time of a fraction of an operation.

        The time is measured if it is in the machine's table, otherwise it follows from the roofline.

        Parameters
        ----------
        call : LocalCall
        phase : str
            One of ``PHASES``.
        fraction : float
            Fraction of the work.
        pieces : int
            Number of kernels that compute it.

        Returns
        -------
        float
            Seconds.
        """
        amount = work(call, phase)
        if not amount.kernels or fraction <= 0:
            return 0.0
        table = self._rank.table
        measured = table.get(f"{call.key} {phase}") if table else None
        if measured is not None:
            # A part of a measured call is assumed proportional; each further piece costs one kernel start.
            return measured * fraction + (pieces - 1) * self._rank.roofline.kernel_s
        flops, nbytes, elements = (fraction * figure for figure in (amount.flops, amount.bytes, amount.elements))
        return self.roofline(Work(flops, nbytes, elements, amount.kernels + pieces - 1))

    def is_estimated(self, op: Operation, parts: AxisParts) -> bool:
        """Return True if the machine has measured times, but not of ``op``, a layer with weights, on this grid.

        Parameters
        ----------
        op, parts
            As in :meth:`operation`.
        """
        table = self._rank.table
        if not table or not op.parameters:
            return False
        call = local_call(op, parts)
        phases = [phase for phase in ("forward", "input", "weight") if work(call, phase).kernels]
        return any(f"{call.key} {phase}" not in table for phase in phases)

    def roofline(self, amount: Work) -> float:
        """Return the time of some work: a fixed cost per kernel, and the slower of arithmetic and memory traffic."""
        roofline = self._rank.roofline
        # Without a number of elements the result is assumed to fill the device.
        one_kernel = roofline.time(amount.flops, amount.bytes, amount.elements or math.inf)
        return one_kernel + (amount.kernels - 1) * roofline.kernel_s

    def operation(self, op: Operation, parts: AxisParts, sharded: str | bool = False) -> OperationCost:
        """Return the cost of an operation on a grid.

        Parameters
        ----------
        op : Operation
            The operation.
        parts : AxisParts
            Grid of its deciding layer.
        sharded : str or bool
            Axes over which its weights are sharded, as :func:`.sharded_axes` takes them.

        Returns
        -------
        OperationCost
        """
        key = (op, parts, sharded)
        cost = self._operations.get(key)
        if cost is None:
            cost = self._operations[key] = self._operation(*key)
        return cost

    def _operation(self, op: Operation, parts: AxisParts, sharded: str | bool) -> OperationCost:
        call = local_call(op, parts)
        fp, bpx, bpw = (self.compute(call, phase) for phase in ("forward", "input", "weight"))
        exchange, strips = self._halo(op, call, parts), self._strips(op, call, parts)
        channels = self._channels(op, call, parts)
        sync_forward, sync_backward = self._sync(op, call, parts)
        error = op.x.requires_grad and op.y.requires_grad
        halo_forward = exchange + channels.gather_x
        # The first layer's input needs no gradient, so its reverse halo exchange and its sum over channels do not
        # happen.
        sent_back = exchange + channels.sum_dx if error else 0.0
        gather, bpa, update = self._parameters(op, call, parts, sharded)
        return OperationCost(
            fp=fp,
            bpx=bpx,
            bpw=bpw,
            bpa=bpa,
            halo_forward=halo_forward + channels.sum_y,
            halo_backward=sent_back + channels.gather_dy,
            sync_forward=sync_forward,
            sync_backward=sync_backward,
            update=update,
            # Sums over channels and statistics follow the computation and cannot be overlapped with it.
            forward=self._forward(call, strips, halo_forward) + channels.sum_y + sync_forward,
            backward=sync_backward + channels.gather_dy + self._backward(call, strips, sent_back),
            gather=gather,
        )

    def _forward(self, call: LocalCall, strips: list[list[float]], exchange: float) -> float:
        """Return the time of FP and its exchange: overlapped with the interior, or one after the other (IV-A).

        With overlap the strips at the boundary are kernels of their own and may take longer than what is hidden.
        distconv uses the faster of the two.
        """
        in_turn = exchange + self.compute(call, "forward")
        if not self._is_overlapped(call):
            return in_turn
        inside, sides = _interior(strips)
        pieces = max(self.compute(call, "forward", inside), exchange)
        return min(in_turn, pieces + self.compute(call, "forward", 1 - inside, sides))

    def _backward(self, call: LocalCall, strips: list[list[float]], exchange: float) -> float:
        """Return the time of BPx, BPw and the exchange of dL/dx.

        The exchange overlaps with BPw, or also with BPx of the interior if that is faster.
        """
        weight, data = self.compute(call, "weight"), self.compute(call, "input")
        if not self._is_overlapped(call):
            return data + weight + exchange
        inside, sides = _interior(strips)
        edges = self.compute(call, "input", 1 - inside, sides)
        # The edges come first, since their gradients are what the neighbours wait for.
        pieces = edges + max(self.compute(call, "input", inside) + weight, exchange)
        return min(data + max(weight, exchange), pieces)

    def _is_overlapped(self, call: LocalCall) -> bool:
        """Return True if the exchange overlaps: only convolutions compute before all of their input has arrived."""
        return self.overlap_halo and call.pieces is not None

    # -- communication of one operation -------------------------------------------------------------------------------

    def _halo(self, op: Operation, call: LocalCall, parts: AxisParts) -> float:
        """Return the time of a halo exchange: send and receive with each neighbour (V-A), packing and unpacking.

        Neighbours across edges and corners have messages of their own, one for each combination of split dimensions.
        """
        widths = dict(self._halo_widths(op, parts))
        sides = {dim: sum(1 for width in sides_of if width) for dim, sides_of in widths.items()}
        near = {dim: max(0, sides[dim] - parts.far_neighbours(str(axes_of(op.x.shape)[dim]))) for dim in widths}
        block, total = call.inputs[0], self._rank.roofline.exchange_s if widths else 0.0
        for count in range(1, len(widths) + 1):
            # One dimension: faces; two: edges of the block; three: corners. Each is a message of its own.
            for dims in itertools.combinations(widths, count):
                messages, close = math.prod(sides[d] for d in dims), math.prod(near[d] for d in dims)
                # The mean width of both sides, since they differ for even kernels and strides.
                elements = math.prod(block) * math.prod(sum(widths[d]) / sides[d] / block[d] for d in dims)
                size = elements * op.x.itemsize
                total += (messages - close) * self.machine.send(size, across=True)
                total += close * self.machine.send(size, across=False)
                # Data are read and written on both sides; exchange_s includes the fixed cost of these kernels.
                total += messages * 4.0 * size / self._rank.roofline.bytes_per_s
        return total

    def _strips(self, op: Operation, call: LocalCall, parts: AxisParts) -> list[list[float]]:
        """Return the fraction of the outputs that wait for the halo of each side, for each split dimension."""
        strips = []
        for dim, widths in self._halo_widths(op, parts):
            rows, out = call.inputs[0][dim], call.outputs[0][dim]
            # Halo rows of the input in rows of the output, whose number differs with a stride.
            strips.append([math.ceil(width * out / rows) / out for width in widths if width])
        return strips

    def _halo_widths(self, op: Operation, parts: AxisParts) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the split spatial dimensions that need a halo, with the rows needed below and above a block."""
        if op.kind in ("interpolate", "upsample"):
            window_free = (1, 1) if op.kwargs.get("mode", "nearest") != "nearest" else (0, 0)
        elif op.window is None:
            return
        for dim, axis in enumerate(axes_of(op.x.shape)):
            split = parts.parts_along(axis)
            if dim < 2 or split == 1 or len(op.y.shape) != len(op.x.shape):
                continue
            if op.window is None:
                widths = window_free
            else:
                widths = widest_halo(op.window, op.x.shape[dim], op.y.shape[dim], split, dim - 2)
            if any(widths):
                yield dim, widths

    def _channels(self, op: Operation, call: LocalCall, parts: AxisParts) -> GemmTime:
        """Return the time to gather the needed channels, and to reduce-scatter partial sums (III-D)."""
        own = local_shape(op.x.shape, parts)
        if call.split is None or (call.split.blocks == 1 and math.prod(call.inputs[0]) <= math.prod(own)):
            return GemmTime(0.0, 0.0, 0.0, 0.0)
        result = math.prod(local_shape(op.y.shape, parts)) * op.y.itemsize
        size = math.prod(own) * op.x.itemsize
        gemm = distributed_gemm(self.machine, parts.group("c"), call.split.blocks, size, result)
        more = self._rank.roofline.exchange_s
        return GemmTime(*(time + more if time else 0.0 for time in astuple(gemm)))

    def _sync(self, op: Operation, call: LocalCall, parts: AxisParts) -> tuple[float, float]:
        """Return the time of the reductions that the computation waits for, forward and backward."""
        split = [axis for axis in axes_of(op.x.shape) if axis and parts.parts_along(axis) > 1]
        if op.kind == "batch_norm":
            over = {"global": ("n", *SPATIAL), "spatial": SPATIAL, "local": ()}[self.settings.batch_norm]
            axes = [axis for axis in split if axis in over]
            # Two numbers for each channel: sum and sum of squares, or the two sums of the gradient.
            once = self._allreduce(parts, axes, 2 * 4.0 * call.inputs[0][1])
            return once, once if op.y.requires_grad else 0.0
        if op.kind in ("group_norm", "instance_norm"):
            axes = [axis for axis in split if axis in SPATIAL or (axis == "c" and op.kind == "group_norm")]
            once = self._allreduce(parts, axes, 2 * 4.0 * call.inputs[0][0] * call.inputs[0][1])
            return once, once if op.y.requires_grad else 0.0
        # Other functions sum over the split axes that their result lacks, as a mean over space does. The sum of a
        # deciding layer over channels is part of _channels.
        lost = [axis for axis in split if axis not in axes_of(op.y.shape)]
        if not lost or op.decides:
            return 0.0, 0.0
        size = math.prod(call.outputs[0]) * op.y.itemsize
        more = self._rank.roofline.exchange_s
        if math.prod(call.outputs[0]) > math.prod(call.inputs[0]):  # a flatten: the block is gathered first
            return self.machine.allgather(parts.group(lost), size) + more, 0.0
        return self._allreduce(parts, lost, size) + more, 0.0

    def _allreduce(self, parts: AxisParts, axes: list[str], size: float) -> float:
        return self.machine.allreduce(parts.group(axes), size) if axes else 0.0

    def _parameters(
        self, op: Operation, call: LocalCall, parts: AxisParts, sharded: str | bool
    ) -> tuple[float, float, float]:
        """Return the time of one gather of the weights, of BPa, and of the optimizer.

        BPa is the all-reduce of the gradients over the ranks that split the work. Sharded weights have a reduce-scatter
        instead, and an all-reduce of each part over the other axes.
        """
        size = self.parameter_bytes(op, call)
        if not size:
            return 0.0, 0.0, 0.0
        # Ranks along c hold other weights if they are split, so their gradients need no sum.
        split_channels = call.split is not None
        axes = [a for a in axes_of(op.x.shape) if a and parts.parts_along(a) > 1 and not (a == "c" and split_channels)]
        # Weights, gradients and each slot of state are read; weights and state are written.
        passes = 3 + 2 * self.settings.optimizer_slots
        stored = sharded_bytes(op, call, parts, sharded)
        if stored.gathered:
            full, over = stored.gathered, sharded_axes(parts, sharded)
            # Layers of few weights share the fixed costs of a message.
            fixed = min(1.0, full / GROUP_BYTES) * self._rank.roofline.exchange_s
            gather = self.machine.allgather(parts.group(over), full) + fixed
            if set(over) <= set(axes):
                rest = [axis for axis in axes if axis not in over]
                bpa = self.machine.reduce_scatter(parts.group(over), full) + fixed
                bpa += self._allreduce(parts, rest, full / parts.group(over).ranks)
            else:
                bpa = self._allreduce(parts, axes, full)
            return gather, bpa, self.roofline(Work(bytes=passes * stored.held))
        update = self.roofline(Work(bytes=passes * size / self.optimizer_ranks(call, parts)))
        # Each rank updates its part of a replicated parameter, and receives the others.
        if self.settings.shard_optimizer:
            update += 0.0 if split_channels else self.machine.allgather(parts.group(parts.shape), size)
        summed = sum(constant.trained for constant in op.constants) if axes else 0
        return 0.0, self._allreduce(parts, axes, size) + summed * self._rank.roofline.gradient_s, update

    def optimizer_ranks(self, call: LocalCall, parts: AxisParts) -> int:
        """Return the number of ranks that share the optimizer's work and state for the parameters of a call.

        Parameters
        ----------
        call : LocalCall
            The operation on one rank.
        parts : AxisParts
            Grid of its deciding layer.

        Returns
        -------
        int
        """
        return parts.ranks if self.settings.shard_optimizer and call.split is None else 1

    def parameter_bytes(self, op: Operation, call: LocalCall) -> float:
        """Return the bytes of the parameters of an operation on one rank.

        Parameters
        ----------
        op : Operation
            The operation.
        call : LocalCall
            The same operation on one rank.

        Returns
        -------
        float
        """
        return float(
            sum(
                math.prod(shape) * constant.itemsize
                for shape, constant in zip(call.constants, op.constants, strict=True)
                if constant.trained
            )
        )

    # -- redistribution -----------------------------------------------------------------------------------------------

    def shuffle(self, value: Value, source: AxisParts, target: AxisParts) -> float:
        """Return the time to redistribute a tensor from one grid to another, in seconds.

        Source: Dryden et al. 2019, III-C and V-B.

        Parameters
        ----------
        value : Value
            The tensor.
        source, target : AxisParts
            Grids before and after.

        Returns
        -------
        float
            Seconds.
        """
        if source == target:
            return 0.0
        # Many layers pass tensors of one shape between the same grids.
        key = (value.shape, value.itemsize, source, target)
        time = self._shuffles.get(key)
        if time is None:
            time = self._shuffles[key] = self._shuffle(value, source, target)
        return time

    def _shuffle(self, value: Value, source: AxisParts, target: AxisParts) -> float:
        moved = redistribution(value.shape, source, target)
        near, far = moved.near * value.itemsize, moved.far * value.itemsize
        if not near + far:
            return 0.0
        machine = self.machine
        time = moved.near_messages * machine.node.latency_s + near / machine.node.bandwidth_bytes_per_s
        time += moved.far_messages * machine.network.latency_s + far / machine.network.bandwidth_bytes_per_s
        # Data are packed on one side and unpacked on the other; what a rank keeps is copied, too.
        copied = 2 * (near + far) + moved.kept * value.itemsize
        return time + self.roofline(Work(bytes=2 * STRIDED * copied, kernels=2)) + self._rank.roofline.exchange_s
