"""``distconv.rule``: an operator that declares the windows of its input.

::

    1  Arguments with windows are brought to one distribution; dimensions without a window are gathered.
    2  Each rank gathers the input of its block of the output: its own block, ghosts and padding.
    3  The operator computes the block from this input, as it would compute the full output.
    4  In backward, gradients of ghosts are added at their owners, and gradients of other tensors are all-reduced.

:mod:`~distconv.layers.rules.check` compares such an operator with a single process.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from distconv.communication.collectives import gather_region
from distconv.communication.routes import Needs
from distconv.communication.transfer import transfer_plan
from distconv.dispatch import implements, map_leaves
from distconv.distribution import Distribution, Interval
from distconv.errors import ShapeError
from distconv.layers.common.alignment import (
    as_distributed,
    redistribute_balanced,
    redistribute_with_grad_reduce,
    replicate_parameter,
)
from distconv.layers.common.empty_blocks import connected_zeros, pad_to_minimum_shape
from distconv.layers.common.input_windows import crop_or_pad
from distconv.layers.rules.window import Window, nonnegative_dims, pad_argument
from distconv.process.profiling import section
from distconv.tensor import DistTensor

Operator = Callable[..., Any]


def rule(*, fill: float = 0.0, serves: object = None, **windows: Mapping[int, Window]) -> Callable[[Operator], Rule]:
    """Declare the input that an operator needs, so that it computes on blocks.

    The decorated operator is called with the input that its outputs need, including padding, and must not pad itself.
    Other tensors, such as weights, are passed in full, and get their full gradient. The output, or each output of a
    tuple, has as many dimensions as the first argument with windows. With plain tensors the operator computes as in a
    single process.

    Parameters
    ----------
    fill : float
        The value of padding.
    serves : callable, optional
        A function of torch, or of another package, for which the operator is called if an argument is a DistTensor.
    **windows : mapping of int to Window
        For each parameter that is a distributed tensor, a :class:`Window` for each dimension whose outputs need a
        window of the input, such as ``x={0: dc.Window(), 2: dc.Window(3, padding=1)}``. Outputs need all of the other
        dimensions.

    Returns
    -------
    callable
        A decorator that returns a ``Rule``, which is called like the operator.

    Raises
    ------
    TypeError
        If the operator has no such parameter.

    Examples
    --------
    >>> import torch.nn.functional as F, distconv as dc
    >>> @dc.rule(x={0: dc.Window(), 1: dc.Window(), 2: dc.Window(3, padding=1), 3: dc.Window()})
    ... def mean_of_rows(x):
    ...     return F.avg_pool2d(x, (3, 1), stride=1)
    """

    def register(operator: Operator) -> Rule:
        declared = Rule(operator, windows, fill)
        if serves is not None:
            implements(serves, tensors=None)(declared)
        return declared

    return register


class Rule:
    """An operator with the windows of its arguments. Created by :func:`rule`.

    Raises
    ------
    TypeError
        If the operator has no such parameter.
    """

    def __init__(self, operator: Operator, windows: Mapping[str, Mapping[int, Window]], fill: float) -> None:
        self.operator, self.windows, self.fill = operator, windows, fill
        functools.update_wrapper(self, operator)
        self._signature = inspect.signature(operator)
        parameters = list(self._signature.parameters)
        unknown = [name for name in windows if name not in parameters]
        if unknown or not windows:
            named = f", not {unknown[0]!r}" if unknown else ""
            raise TypeError(f"{self.name} takes {', '.join(parameters)}; name one of these with its windows{named}")

    @property
    def name(self) -> str:
        """Name of the operator."""
        return str(getattr(self.operator, "__name__", type(self.operator).__name__))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator; with DistTensors the result is distributed, and the call is collective.

        Parameters
        ----------
        *args, **kwargs
            Arguments of the operator.

        Returns
        -------
        object
            The result of the operator, with tensors as DistTensors if an argument is one.
        """
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        windows = self.windows_of(arguments)
        distributed: list[DistTensor] = []
        map_leaves(lambda value: distributed.append(value) if isinstance(value, DistTensor) else None, dict(arguments))
        if not distributed:
            # The operator never pads itself, so that a block with its halo and a padded tensor look the same to it.
            for name, by_dim in windows.items():
                around = pad_argument(arguments[name].dim(), {dim: window.around for dim, window in by_dim.items()})
                if any(around):
                    arguments[name] = F.pad(arguments[name], around, value=self.fill)
            return self.operator(*bound.args, **bound.kwargs)
        work = _RuleWork.from_arguments(self, windows, arguments, distributed[0])
        with section(self.name):
            # In the order of the signature, so that all ranks send the same messages.
            for name, value in arguments.items():
                if name in windows:
                    arguments[name] = work.gather_input(value, windows[name], self.fill)
                else:
                    arguments[name] = map_leaves(work.replicate, value)
            outputs = self.operator(*bound.args, **bound.kwargs)
            return tuple(map(work.wrap_output, outputs)) if isinstance(outputs, tuple) else work.wrap_output(outputs)

    def windows_of(self, arguments: Mapping[str, Any]) -> dict[str, dict[int, Window]]:
        """Return the windows of the arguments that are not None.

        Parameters
        ----------
        arguments : mapping
            The arguments by name.

        Returns
        -------
        dict of dict
            A :class:`Window` by argument and dimension.

        Raises
        ------
        ShapeError
            If arguments are not tensors, or differ in their number of dimensions or outputs.
        """
        tensors = {name: arguments[name] for name in self.windows if arguments.get(name) is not None}
        if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
            raise ShapeError(f"{self.name}: {', '.join(self.windows)} must be tensors")
        lead = next(iter(tensors))
        outputs: dict[int, int] = {}
        for name, tensor in tensors.items():
            if tensor.dim() != tensors[lead].dim():
                raise ShapeError(
                    f"{self.name}: {name!r} has {tensor.dim()} dimensions, but {lead!r} has {tensors[lead].dim()}"
                )
            for dim, window in nonnegative_dims(self.windows[name], tensor.dim()).items():
                count = window.outputs(tensor.shape[dim])
                if _is_broadcast(tensor, dim, window, outputs):
                    continue
                if count < 1 or outputs.setdefault(dim, count) != count:
                    raise ShapeError(
                        f"{self.name}: dimension {dim} of {name!r}, {tuple(tensor.shape)}, leaves {count} outputs by "
                        f"{window}. {outputs.get(dim, 'At least 1')} are required."
                    )
        return {name: nonnegative_dims(self.windows[name], tensor.dim()) for name, tensor in tensors.items()}


class _RuleWork(NamedTuple):
    """The distribution of the output, from which this rank's part of the work follows."""

    name: str
    dist: Distribution
    """Distribution of the output."""
    outputs: Mapping[int, int]
    """Sizes of the output by dimension with a window."""

    @classmethod
    def from_arguments(
        cls, rule: Rule, windows: Mapping[str, Mapping[int, Window]], arguments: Mapping[str, Any], example: DistTensor
    ) -> _RuleWork:
        """Return the work for arguments; the first argument with windows determines the distribution."""
        lead = next(iter(windows))
        first = as_distributed(arguments[lead], example.grid)
        # Nothing is known about dimensions without windows: the operator may mix all of their elements.
        axes = [axis if dim in windows[lead] else None for dim, axis in enumerate(first.dist.axes)]
        out = {dim: window.outputs(first.shape[dim]) for dim, window in windows[lead].items()}
        return cls(rule.name, Distribution(first.grid, axes), out)

    def output_block(self, dim: int, part: int | None = None) -> Interval:
        """Return the outputs of a block (None: this rank's block) along a dimension."""
        return self.dist.intervals(dim, self.dist.coordinate(dim) if part is None else part, self.outputs[dim])[0]

    @property
    def is_empty(self) -> bool:
        """True if this rank has no outputs."""
        return any(self.output_block(dim).extent == 0 for dim in self.outputs)

    def replicate(self, value: Any) -> Any:
        """Return a tensor without windows in full; its gradient is all-reduced. Collective."""
        return replicate_parameter(value, self.dist) if isinstance(value, torch.Tensor) else value

    def gather_input(self, value: torch.Tensor, windows: Mapping[int, Window], fill: float) -> torch.Tensor:
        """Return the input of this rank's outputs of an argument with windows. Collective."""
        tensor = redistribute_balanced(as_distributed(value, self.dist.grid))
        gathered = {
            dim: window for dim, window in windows.items() if not _is_broadcast(tensor, dim, window, self.outputs)
        }
        layout = Distribution(
            self.dist.grid, [axis if dim in gathered else None for dim, axis in enumerate(self.dist.axes)]
        )
        # 1. Bring the argument to the distribution of the work; where it broadcasts, its gradient is all-reduced.
        reduced = [axis for axis in self.dist.split_axes if axis not in layout.split_axes]
        block, ranges = redistribute_with_grad_reduce(tensor, layout, reduced), []
        for dim, window in gathered.items():
            axis = layout.split[dim]
            if axis is not None:
                parts = range(layout.grid.shape[axis])
                ranges.append((dim, tuple(window.needed(self.output_block(dim, part)) for part in parts)))
        # 2. Gather the windows of this rank's outputs.
        needs = Needs(layout, tuple(ranges))
        if ranges:
            block = gather_region(block, transfer_plan(layout, needs, tuple(tensor.shape)))
        covered = needs.box(tensor.shape)
        wanted = [
            gathered[dim].needed(self.output_block(dim)) if dim in gathered else covered[dim]
            for dim in range(tensor.dim())
        ]
        # 3. Pad at the ends of the global tensor.
        block = crop_or_pad(block, covered, [(each.start, each.stop) for each in wanted], fill)
        # The operator also runs on ranks without outputs: their weights need a gradient of zeros for the all-reduce.
        if self.is_empty:
            return pad_to_minimum_shape(
                block, [gathered[dim].reach if dim in gathered else 1 for dim in range(tensor.dim())]
            )
        return block

    def wrap_output(self, y: Any) -> DistTensor:
        """Return the output whose block on this rank is ``y``.

        Raises
        ------
        ShapeError
            If the operator returns another number of outputs than its windows declare.
        """
        if not isinstance(y, torch.Tensor) or y.dim() != len(self.dist.axes):
            raise ShapeError(f"{self.name} must return tensors of {len(self.dist.axes)} dimensions")
        expected = {dim: 1 if self.is_empty else self.output_block(dim).extent for dim in self.outputs}
        if self.is_empty:
            y = y[tuple(slice(0, 1) if dim in self.outputs else slice(None) for dim in range(y.dim()))]
        wrong = [dim for dim, extent in expected.items() if y.shape[dim] != extent]
        if wrong:
            raise ShapeError(
                f"{self.name} returns {tuple(y.shape)}, but its windows leave {expected[wrong[0]]} outputs in "
                f"dimension {wrong[0]}. Its input already includes the padding, so it must not pad."
            )
        shape = torch.Size(self.outputs.get(dim, extent) for dim, extent in enumerate(y.shape))
        local = self.dist.local_shape(shape)
        return DistTensor(connected_zeros(y, local) if self.is_empty else y, self.dist, shape)


def _is_broadcast(tensor: torch.Tensor, dim: int, window: Window, outputs: Mapping[int, int]) -> bool:
    """Return True if the only index of a dimension serves all outputs, as in broadcasting."""
    return tensor.shape[dim] == 1 and window == Window() and outputs.get(dim, 1) != 1
