"""Work of one rank in one operation: local shapes, FLOPs, bytes, and the key of its measured time.

Convolutions and linear layers count FLOPs. All other functions are estimated by the memory that they read and write;
the trace records what autograd saves. Users add other costs with :func:`register_cost`. :mod:`.operation_cost` turns
work into time.

All shapes are those of the rank with the largest blocks, which determines the time of all ranks.

Source: Dryden et al. 2019, V-A (local runtimes C, Cx, Cw of FP, BPx and BPw on the block of rank p).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from distconv.dispatch import rule_of
from distconv.errors import ShapeError
from distconv.parameters.channel_split import ChannelSplit, channel_split, linear_axes
from distconv.perfmodel.cost.block_geometry import AxisParts, axes_of, local_shape
from distconv.perfmodel.cost.convolution_pieces import ConvolutionRanges, convolution_ranges
from distconv.perfmodel.graph.graph import LayerGraph, Operation, Value

Shape = tuple[int, ...]

PHASES = ("forward", "input", "weight")
"""FP, BPx (gradient of the input, or the full backward pass of a function without weights) and BPw."""


@dataclass(frozen=True)
class Work:
    """Amount of work of one rank.

    Attributes
    ----------
    flops : float
        Floating-point operations.
    bytes : float
        Bytes read and written.
    elements : float
        Elements over which kernels run in parallel; 0 if unknown.
    kernels : int
        Number of kernels.
    """

    flops: float = 0.0
    bytes: float = 0.0
    elements: float = 0.0
    kernels: int = 1


NO_WORK = Work(kernels=0)


@dataclass(frozen=True)
class LocalCall:
    """Operation on one rank, with the shapes of its blocks.

    A cost of :func:`register_cost` receives a LocalCall.

    Attributes
    ----------
    operation : Operation
        The operation with its global shapes.
    inputs, outputs : tuple of tuple of int
        Local shapes, with the channels that the rank needs and the filters that it computes.
    constants : tuple of tuple of int
        Local shapes of parameters and buffers.
    groups : int
        Local number of groups.
    split : ChannelSplit or None
        Split of channels and filters; None if the channels are not split.
    pieces : ConvolutionRanges or None
        Owned and received ranges of a convolution's input; None if nothing is received.
    """

    operation: Operation
    inputs: tuple[Shape, ...]
    constants: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    groups: int
    split: ChannelSplit | None
    pieces: ConvolutionRanges | None = None

    @property
    def key(self) -> str:
        """Key in a table of measured times, without the phase."""
        op = self.operation
        written = [op.kind, *(_x(s) for s in self.inputs), *(_x(s) for s in self.constants), "->", _x(self.outputs[0])]
        if op.window is not None:
            w = op.window
            written += [f"k{_x(w.kernel)}", f"s{_x(w.stride)}", f"p{_x(w.padding)}", f"d{_x(w.dilation)}"]
        if self.groups > 1:
            written.append(f"g{self.groups}")
        if self.pieces is not None:
            written += ["of", self.pieces.name]
        return " ".join([*written, op.y.dtype])


def _x(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "1"


@lru_cache(maxsize=1 << 17)
def local_call(op: Operation, parts: AxisParts) -> LocalCall:
    """Return the largest part of an operation that a rank computes.

    Parameters
    ----------
    op : Operation
        Operation of a graph.
    parts : AxisParts
        Grid of its layer.

    Returns
    -------
    LocalCall
        Local shapes of the rank with the largest blocks.
    """
    inputs = tuple(local_shape(value.shape, parts, axes_in(op, value)) for value in op.inputs)
    outputs = tuple(local_shape(value.shape, parts, axes_in(op, value)) for value in op.outputs)
    constants = tuple(constant.shape for constant in op.constants)
    split = channel_layout(op, parts.parts_along("c"))
    if split is None:
        return LocalCall(
            operation=op,
            inputs=inputs,
            constants=_local_constants(op, constants, inputs),
            outputs=outputs,
            groups=op.groups,
            split=None,
            pieces=convolution_ranges(op, parts, None),
        )
    # The largest numbers of channels and of filters, which may be those of different ranks.
    axis = _feature_dim(op)
    needed = max(split.input_channels(i).extent for i in range(split.parts))
    computed = max(split.output_filters(i).extent for i in range(split.parts))
    weight = (computed, needed // split.local_groups, *constants[0][2:])
    if op.window is not None and op.window.transposed:
        weight = (needed, computed // split.local_groups, *constants[0][2:])
    shapes = (weight, *((computed,) for _ in constants[1:]))
    return LocalCall(
        operation=op,
        inputs=(_replace_size(inputs[0], axis, needed), *inputs[1:]),
        constants=shapes,
        outputs=(_replace_size(outputs[0], axis, computed), *outputs[1:]),
        groups=split.local_groups,
        split=split,
        pieces=convolution_ranges(op, parts, split),
    )


def axes_in(op: Operation, value: Value) -> tuple[str | None, ...]:
    """Return the grid axis of each dimension of an input or output of an operation.

    Parameters
    ----------
    op : Operation
    value : Value
        Input or output of ``op``.

    Returns
    -------
    tuple of str or None
        Axis of each dimension; None where it is replicated.
    """
    return linear_axes(len(value.shape)) if op.kind == "linear" else axes_of(value.shape)


def _local_constants(op: Operation, constants: tuple[Shape, ...], inputs: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """Return the local shapes of constants: vectors with one entry per channel are split with the channels."""
    if op.decides or len(op.x.shape) < 2:
        return constants
    # By shape: the recorded function does not say which of its constants belong to channels.
    channels, own = op.x.shape[1], inputs[0][1]
    return tuple((own,) if shape == (channels,) else shape for shape in constants)


def channel_layout(op: Operation, parts: int) -> ChannelSplit | None:
    """Return the split of a deciding operation's channels over some ranks.

    Parameters
    ----------
    op : Operation
    parts : int
        Parts along the grid axis ``c``.

    Returns
    -------
    ChannelSplit or None
        None if ``parts`` is 1 or the operation is not a deciding layer.

    Raises
    ------
    ShapeError
        If the channels or groups do not divide.
    """
    if parts == 1 or not op.decides:
        return None
    dim = _feature_dim(op)
    channels, filters = op.x.shape[dim], op.y.shape[dim]
    if op.window is None:
        return channel_split(channels, filters, op.groups, parts)
    return channel_split(channels, filters, op.groups, parts, tuple(op.window.stride), transposed=op.window.transposed)


def is_divisible(op: Operation, parts: int) -> bool:
    """Return True if the channels and groups of a deciding operation divide over some ranks.

    Parameters
    ----------
    op : Operation
    parts : int
        Parts along the grid axis ``c``.
    """
    try:
        channel_layout(op, parts)
    except ShapeError:
        return False
    return True


def _feature_dim(op: Operation) -> int:
    return len(op.x.shape) - 1 if op.kind == "linear" else 1


def _replace_size(shape: Shape, dim: int, extent: int) -> Shape:
    return (*shape[:dim], extent, *shape[dim + 1 :])


# -- costs ------------------------------------------------------------------------------------------------------------

Cost = Callable[[LocalCall], tuple[Work, Work]]

_registered: dict[str, Cost] = {}


def register_cost(kind: str, cost: Cost) -> None:
    """Set the cost of a torch function.

    Without it, a function that the model does not know is estimated by the memory that it touches and listed in
    ``Prediction.unknown``.

    Parameters
    ----------
    kind : str
        Name of the function, as in ``Operation.kind``.
    cost : callable
        ``cost(call)`` receives a :class:`LocalCall` and returns the forward and backward :class:`Work` of one rank.
    """
    # Cached models have the registered costs in their key; this cache does not.
    _registered[kind] = cost
    work.cache_clear()


def registered_costs() -> tuple[tuple[str, Cost], ...]:
    """Return the registered costs, as part of the key under which models are cached."""
    return tuple(_registered.items())


def unknown_functions(graph: LayerGraph) -> tuple[str, ...]:
    """Return the functions of a graph that the model estimates by the memory that they touch.

    Parameters
    ----------
    graph : LayerGraph

    Returns
    -------
    tuple of str
        Function, and in parentheses the first operation that calls it.
    """
    first: dict[str, str] = {}
    for op in graph.operations:
        if not op.view and op.kind not in _registered and not _passes(op):
            first.setdefault(op.kind, op.name)
    return tuple(f"{kind} ({name})" for kind, name in first.items())


def _passes(op: Operation) -> int:
    """Return how often a function reads its input.

    The result is 0 if the function has no operator, or if memory traffic does not determine its cost.
    """
    rule = rule_of(op.function)
    return 0 if rule is None else rule.passes or 0


@lru_cache(maxsize=1 << 17)
def work(call: LocalCall, phase: str) -> Work:
    """Return the work of one rank in one phase of an operation.

    Parameters
    ----------
    call : LocalCall
        Local shapes.
    phase : {"forward", "input", "weight"}
        FP, BPx or BPw.

    Returns
    -------
    Work
        No kernels if there is nothing to compute, as for views and tensors without a gradient.
    """
    op = call.operation
    if op.view or (phase != "forward" and not op.y.requires_grad):
        return NO_WORK
    if op.kind in _registered:
        forward, backward = _registered[op.kind](call)
        return {"forward": forward, "input": backward, "weight": NO_WORK}[phase]
    if op.window is not None and op.kind.startswith("conv"):
        return _multiply(call, phase, _convolution_macs(call))
    if op.kind == "linear":
        return _multiply(call, phase, math.prod(call.outputs[0]) * call.inputs[0][-1])
    return _memory_bound(call, phase)


def _convolution_macs(call: LocalCall) -> float:
    """Return the multiply-adds: one per kernel element, feature and output (input if transposed)."""
    window = call.operation.window
    assert window is not None
    kernel = math.prod(window.kernel)
    dense, features = call.outputs[0], call.inputs[0][1]
    if window.transposed:
        dense, features = call.inputs[0], call.outputs[0][1]
    return math.prod(dense) * kernel * features / call.groups


def _multiply(call: LocalCall, phase: str, macs: float) -> Work:
    op = call.operation
    if phase == "input" and not op.x.requires_grad:
        return NO_WORK
    if phase == "weight" and not op.parameters:
        return NO_WORK
    # Each phase reads two of input, output and weight, and writes the third.
    elements = sum(math.prod(s) for s in (call.inputs[0], call.outputs[0], *call.constants))
    result = math.prod({"forward": call.outputs[0], "input": call.inputs[0], "weight": call.constants[0]}[phase])
    if phase == "weight":
        # Kernels also split the sum over samples and positions, so a small weight does not leave the device idle.
        result = max(result, math.prod(call.outputs[0]))
    return Work(2.0 * macs, float(elements * op.y.itemsize), result)


def _memory_bound(call: LocalCall, phase: str) -> Work:
    op = call.operation
    if phase == "weight" or (phase == "input" and not any(v.requires_grad for v in op.inputs) and not op.parameters):
        return NO_WORK
    # Functions without an operator count as one pass.
    passes = max(1, _passes(op))
    read = passes * _bytes(call.inputs, op.inputs)
    written = _bytes(call.outputs, op.outputs)
    # Kernels parallelize over the largest tensor, such as the input of a reduction.
    elements = max(math.prod(shape) for shape in (*call.inputs, *call.outputs))
    if phase == "forward":
        return Work(bytes=read + written, elements=elements)
    # Backward reads dL/dy and what was saved, as often as forward read x, and writes dL/dx.
    # Saved tensors have global shapes, of which this rank has the same fraction as of the output.
    scale = math.prod(call.outputs[0]) / max(1, op.y.elements)
    saved = sum(value.elements * value.itemsize for value in op.saved) * scale
    return Work(bytes=passes * (written + saved) + _bytes(call.inputs, op.inputs), elements=elements)


def _bytes(shapes: tuple[Shape, ...], values: tuple[Value, ...]) -> float:
    return float(sum(math.prod(shape) * value.itemsize for shape, value in zip(shapes, values, strict=True)))
