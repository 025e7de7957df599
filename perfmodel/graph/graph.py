"""The layers of a network and what flows between them, as recorded by :func:`distconv.perfmodel.trace`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from distconv.kernels.convolution import Geometry, Range

INPUT = -1
"""Producer of what the network is given."""


@dataclass(frozen=True)
class Value:
    """A tensor that an operation reads or makes.

    ``shape`` is global, ``storage`` equal for tensors that share memory, ``producer`` the index of the operation that
    made it last, or INPUT.
    """

    shape: tuple[int, ...]
    itemsize: int
    dtype: str
    storage: int
    producer: int
    requires_grad: bool

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GraphConstant:
    """A parameter or buffer of the model; ``trained`` if it has a gradient, ``name`` empty if it is neither."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    dtype: str
    trained: bool

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class KernelWindow(Geometry):
    """What a convolution or pooling looks at; ``transposed`` if its outputs look at it."""

    transposed: bool = False

    def needed(self, dim: int, out: Range) -> Range:
        """Input range that the outputs ``out`` (not empty) of dimension ``dim`` need; may leave the input."""
        if not self.transposed:
            return super().needed(dim, out)
        # Output o is touched by inputs i with o = i * stride - padding + k * dilation.
        first = out[0] + self.padding[dim] - self.reach(dim) + 1
        last = out[1] - 1 + self.padding[dim]
        return -(-first // self.stride[dim]), last // self.stride[dim] + 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Operation:
    """One call of a torch function in the forward pass.

    ``kind`` is the function's name; ``layer`` the deciding layer whose distribution it has; ``decides`` says that it is
    that layer. ``args`` and ``kwargs`` are the call's, with a :class:`Value` or :class:`GraphConstant` for each tensor.
    ``saved`` are the tensors that autograd keeps for its backward pass. ``in_place`` and ``view`` say that its result
    is its input, or shares its memory.
    """

    index: int
    name: str
    kind: str
    layer: str
    decides: bool
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[Value, ...]
    constants: tuple[GraphConstant, ...]
    outputs: tuple[Value, ...]
    saved: tuple[Value, ...]
    in_place: bool
    view: bool
    window: KernelWindow | None = None
    groups: int = 1

    @property
    def parameters(self) -> tuple[GraphConstant, ...]:
        """What it is trained on."""
        return tuple(constant for constant in self.constants if constant.trained)

    @property
    def x(self) -> Value:
        """Its first input."""
        return self.inputs[0]

    @property
    def y(self) -> Value:
        """Its first output."""
        return self.outputs[0]


@dataclass(eq=False)
class LayerGraph:
    """Operations in the order of the forward pass.

    ``deciding`` are the names of the convolution and linear layers, in the order in which they run: a plan gives each
    of them a distribution (V-C); every other operation has its first argument's.
    """

    model: str
    input_shapes: tuple[tuple[int, ...], ...]
    input_layer: str
    operations: tuple[Operation, ...]
    deciding: tuple[str, ...]
    caches: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def by_layer(self) -> dict[str, tuple[Operation, ...]]:
        """The calls of each deciding layer: more than one where it is used more than once."""
        return {name: tuple(op for op in self.operations if op.decides and op.layer == name) for name in self.deciding}

    @property
    def batch(self) -> int:
        """Samples in the mini-batch."""
        return self.input_shapes[0][0]

    def layer_of(self, value: Value) -> str:
        """The deciding layer whose distribution ``value`` has."""
        return self.input_layer if value.producer == INPUT else self.operations[value.producer].layer

    def __repr__(self) -> str:
        return (
            f"LayerGraph({self.model}, inputs {self.input_shapes}, {len(self.operations)} operations, "
            f"{len(self.deciding)} deciding layers)"
        )
