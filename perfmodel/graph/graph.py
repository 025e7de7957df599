"""Layers of a network and the values between them, as recorded by :func:`distconv.perfmodel.trace`.

The cost model reads these classes. They hold global shapes and are independent of plan, grid and machine. A deciding
layer is a convolution or linear layer, for which a plan chooses the distribution; see :class:`LayerGraph`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from distconv.kernels.convolution import Geometry, Range

INPUT = -1
"""``Value.producer`` of the network's inputs."""


@dataclass(frozen=True)
class Value:
    """Tensor that an operation reads or returns.

    Attributes
    ----------
    shape : tuple of int
        Global shape.
    itemsize : int
        Bytes per element.
    dtype : str
        Name without the prefix ``torch.``.
    storage : int
        Number of the storage; equal for tensors that share memory.
    producer : int
        Index of the last operation that returned the tensor, or :data:`INPUT`.
    requires_grad : bool
        True if autograd computes a gradient of the tensor. Otherwise False.
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
    """Parameter, buffer or other tensor that does not depend on the network's inputs.

    Attributes
    ----------
    name : str
        Name of the parameter or buffer; empty for any other tensor.
    shape : tuple of int
        Global shape.
    itemsize : int
        Bytes per element.
    dtype : str
        Name without the prefix ``torch.``.
    trained : bool
        True for a parameter that requires a gradient. Otherwise False.
    """

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
    """Window of a convolution or pooling: kernel, stride, padding and dilation of each spatial dimension.

    Attributes
    ----------
    transposed : bool
        True for a transposed convolution. Otherwise False.
    """

    transposed: bool = False

    def needed(self, dim: int, out: Range) -> Range:
        """Return the input range that a range of outputs needs.

        Parameters
        ----------
        dim : int
            Spatial dimension.
        out : tuple of int
            Half-open output range, not empty.

        Returns
        -------
        tuple of int
            Half-open input range. It includes padding, so it may exceed the input.
        """
        if not self.transposed:
            return super().needed(dim, out)
        # Output o depends on the inputs i with o = i * stride - padding + k * dilation.
        # The smallest i with i * stride >= first, and the largest with i * stride <= last.
        first = out[0] + self.padding[dim] - self.reach(dim) + 1
        last = out[1] - 1 + self.padding[dim]
        return -(-first // self.stride[dim]), last // self.stride[dim] + 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Operation:
    """One call of a torch function in the forward pass.

    Attributes
    ----------
    index : int
        Position in the graph's ``operations``.
    name : str
        Unique name: the deciding layer or the module that called, ``#2`` and so on appended for later calls.
    kind : str
        Name of the torch function, such as ``"conv2d"``; ``"view"`` for a property.
    layer : str
        Deciding layer whose distribution the operation has.
    decides : bool
        True if the operation is a call of that layer itself. Otherwise it inherits the distribution.
    function : callable
        The torch function.
    args, kwargs
        Arguments of the call, with a :class:`Value` or :class:`GraphConstant` in place of each tensor.
    inputs : tuple of Value
        Arguments that depend on the network's inputs.
    constants : tuple of GraphConstant
        All other tensor arguments, each once.
    outputs : tuple of Value
        Results.
    saved : tuple of Value
        Tensors that autograd keeps for backward, without parameters and buffers.
    in_place : bool
        True if the result is one of the arguments. Otherwise False.
    view : bool
        True if the results share memory with the inputs. Otherwise False.
    window : KernelWindow or None
        Window of a convolution or pooling.
    groups : int
        Groups of a convolution.
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
        """Constants that are trained."""
        return tuple(constant for constant in self.constants if constant.trained)

    @property
    def x(self) -> Value:
        """First input."""
        return self.inputs[0]

    @property
    def y(self) -> Value:
        """First output."""
        return self.outputs[0]


@dataclass(eq=False)
class LayerGraph:
    """Operations of a network in the order of the forward pass.

    A plan gives each deciding layer a distribution. Every other operation inherits the distribution of its first input.

    Source: Dryden et al. 2019, V-C.

    Attributes
    ----------
    model : str
        Name of the model's class.
    input_shapes : tuple of tuple of int
        Global shapes (N, C, ...) of the network's inputs.
    input_layer : str
        Deciding layer whose distribution the network's inputs have: of the layers that ran, the first in
        ``named_modules()``.
    operations : tuple of Operation
        All recorded calls.
    deciding : tuple of str
        Names of the convolution and linear layers, in the order in which they first run.
    caches : dict
        Costs and models that the cost model computed for this graph.
    """

    model: str
    input_shapes: tuple[tuple[int, ...], ...]
    input_layer: str
    operations: tuple[Operation, ...]
    deciding: tuple[str, ...]
    caches: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def by_layer(self) -> dict[str, tuple[Operation, ...]]:
        """Calls of each deciding layer, by its name; several if the layer is used more than once."""
        return {name: tuple(op for op in self.operations if op.decides and op.layer == name) for name in self.deciding}

    @property
    def batch(self) -> int:
        """Number of samples in the mini-batch."""
        return self.input_shapes[0][0]

    def layer_of(self, value: Value) -> str:
        """Return the name of the deciding layer whose distribution a value has.

        Parameters
        ----------
        value : Value
            Value of this graph.

        Returns
        -------
        str
            Name of the layer.
        """
        return self.input_layer if value.producer == INPUT else self.operations[value.producer].layer

    def __repr__(self) -> str:
        return (
            f"LayerGraph({self.model}, inputs {self.input_shapes}, {len(self.operations)} operations, "
            f"{len(self.deciding)} deciding layers)"
        )
