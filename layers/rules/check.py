"""Comparison of an operator that has a rule with the single-process result, on all grids.

Values and gradients are compared in float64. In one process the output is computed block by block, each block from the
input of its windows. Over ranks it is computed on every grid of these ranks, with balanced blocks, a first block of one
index and an empty block. Users call :func:`check_rule` in their tests.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from mpi4py import MPI

from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks
from distconv.communication.digest import digest
from distconv.distribution import Distribution, Interval, default_axes
from distconv.errors import MismatchError
from distconv.grid import ProcessGrid
from distconv.layers.rules.rule import Rule
from distconv.layers.rules.window import Window, pad_argument
from distconv.placement import gather, scatter
from distconv.tensor import DistTensor

Arguments = Mapping[str, Any]
"""Arguments by name."""

TOLERANCE = 1e-10
"""Permitted difference in float64, relative to the largest value."""


def check_rule(function: Callable[..., Any], example: Sequence[Any], comm: MPI.Intracomm | None = None) -> list[str]:
    """Check that an operator with a rule has the values and gradients of a single process.

    Collective: call on every rank of ``comm``.

    Parameters
    ----------
    function : callable
        The decorated operator.
    example : sequence
        Its arguments, which are identical on all ranks. Tensors are converted to float64.
    comm : MPI.Intracomm, optional
        The ranks (default: ``MPI.COMM_WORLD``).

    Returns
    -------
    list of str
        Descriptions of the cases that were compared.

    Raises
    ------
    MismatchError
        On every rank, if a result differs: the operator needs more of its input than it declares, or a value of the
        full tensor, such as a mean. Also if ranks pass different examples.
    TypeError
        If the operator has no rule.

    Examples
    --------
    >>> dc.check_rule(mean_of_rows, (torch.randn(1, 1, 9, 4),))   # doctest: +SKIP
    """
    if not isinstance(function, Rule):
        raise TypeError(f"{getattr(function, '__name__', function)} has no rule. Decorate it with distconv.rule(...).")
    comm = MPI.COMM_WORLD if comm is None else comm
    bound = inspect.signature(function.operator).bind(*example)
    bound.apply_defaults()
    # In float64 differences that are not rounding exceed TOLERANCE. Detached, so that each case has its own graph.
    arguments = {
        name: value.detach().double() if _is_floating(value) else value for name, value in bound.arguments.items()
    }
    texts = [f"{name} {digest(value):014x}" for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    check_same_on_all_ranks(comm, f"example of {function.name}", ", ".join(texts), "seed all ranks identically")
    # 1. The single-process result. 2. Block by block on this process, which finds windows that are too small without
    # messages. 3. On each grid.
    call = partial(_call_by_name, function)
    expected = _outputs_and_gradients(call, arguments, comm, f"{function.name}, single process")
    compared = []
    for what, by_blocks in _blockwise_cases(function, arguments):
        _compare(
            function.name,
            what,
            _outputs_and_gradients(by_blocks, arguments, comm, f"{function.name}, {what}"),
            expected,
        )
        compared.append(what)
    for what, distributed in _distributed_cases(function, arguments, comm):
        _compare(
            function.name, what, _outputs_and_gradients(call, distributed, comm, f"{function.name}, {what}"), expected
        )
        compared.append(what)
    return compared


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _call_by_name(function: Callable[..., Any], arguments: Arguments) -> Any:
    bound = inspect.signature(function).bind_partial()
    bound.arguments.update(arguments)
    return function(*bound.args, **bound.kwargs)


def _outputs_and_gradients(
    call: Callable[[Arguments], Any], arguments: Arguments, comm: MPI.Intracomm, what: str
) -> dict[str, torch.Tensor]:
    """Return the full outputs and the full gradient of each argument. Collective."""

    def attempt() -> Any:
        try:
            return call(leaves)
        except Exception as error:
            reason = " ".join(f"{error}".split())
            raise MismatchError(f"{what}: the operator failed: {type(error).__name__}: {reason}") from error

    leaves = {
        name: value.detach().requires_grad_() if _is_floating(value) else value for name, value in arguments.items()
    }
    # The operator is the user's: if it fails on one rank only, the others would wait in the next collective.
    outputs = try_on_all_ranks(comm, attempt, MismatchError)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    outcome = {f"output {index}": gather(y).detach() for index, y in enumerate(outputs)}
    total: Any = 0.0
    for index, y in enumerate(outputs):
        if _is_floating(y):
            # Different weights for all elements: the gradient of a plain sum would hide exchanged elements. The same
            # numbers on all ranks.
            weight = torch.rand(tuple(y.shape), generator=torch.Generator().manual_seed(index), dtype=y.dtype)
            total = total + (y * (scatter(weight, y.dist) if isinstance(y, DistTensor) else weight)).sum()
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    for name, leaf in leaves.items():
        if _is_floating(leaf) and leaf.grad is not None:
            outcome[f"gradient of {name!r}"] = gather(leaf.grad).detach()
    return outcome


def _compare(name: str, what: str, actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Raise MismatchError if outputs or gradients differ from those of a single process."""
    if actual.keys() != expected.keys():
        raise MismatchError(
            f"{name}, {what}: results {', '.join(actual)}, but {', '.join(expected)} in a single process"
        )
    for which, full in expected.items():
        other = actual[which]
        if other.shape != full.shape:
            raise MismatchError(
                f"{name}, {what}: {which} is {tuple(other.shape)}, but {tuple(full.shape)} in a single process"
            )
        if not full.numel():
            continue
        # NaN counts as equal to NaN only.
        difference = (other - full).abs().double().nan_to_num(torch.inf)
        difference = torch.where(other.isnan() & full.isnan(), 0.0, difference)
        if difference.max() > TOLERANCE * max(1.0, float(full.abs().nan_to_num(0.0).max())):
            index = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
            raise MismatchError(
                f"{name}, {what}: {which} differs by {float(difference.max()):.2g} at {index} from the "
                "single-process result. The operator needs more of its input than its windows declare, pads, or "
                "reduces over the full tensor."
            )


def _blockwise_cases(function: Rule, arguments: Arguments) -> Iterator[tuple[str, Callable[[Arguments], Any]]]:
    """Yield functions that compute the output in blocks along each dimension with windows, in this process."""
    windows = function.windows_of(arguments)
    lead = next(iter(windows))
    for dim, window in windows[lead].items():
        extent = window.outputs(arguments[lead].shape[dim])
        for inner in ({1}, {extent // 3, extent // 3 + 1}):
            bounds = sorted({0, *inner, extent})
            blocks = [Interval(a, b) for a, b in itertools.pairwise(bounds)]
            if len(blocks) > 1:
                text = f"blocks of dimension {dim} that end at {', '.join(map(str, bounds[1:]))}"
                yield text, partial(_compute_by_blocks, function, windows, dim, blocks)


def _compute_by_blocks(
    function: Rule, windows: Mapping[str, Mapping[int, Window]], dim: int, blocks: Sequence[Interval], leaves: Arguments
) -> Any:
    """Compute the output from blocks of it along ``dim``, and concatenate them."""
    parts = []
    for block in blocks:
        needed = {
            name: _padded_input(leaf, windows[name], dim, block, function.fill) if name in windows else leaf
            for name, leaf in leaves.items()
        }
        parts.append(_call_by_name(function.operator, needed))
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(each, dim) for each in zip(*parts, strict=True))
    return torch.cat(parts, dim)


def _padded_input(tensor: Any, windows: Mapping[int, Window], dim: int, block: Interval, fill: float) -> Any:
    """Return the padded input of the outputs ``block`` along ``dim``."""
    # All dimensions are padded, but only `dim` is divided. A size of one broadcasts, and is not divided.
    padded = F.pad(tensor, pad_argument(tensor.dim(), {d: w.around for d, w in windows.items()}), value=fill)
    if dim not in windows or tensor.shape[dim] == 1:
        return padded
    needed, front = windows[dim].needed(block), windows[dim].around[0]
    return padded.narrow(dim, needed.start + front, needed.extent)


def _distributed_cases(function: Rule, arguments: Arguments, comm: MPI.Intracomm) -> Iterator[tuple[str, Arguments]]:
    """Yield the arguments distributed over every grid of the ranks, in equal and in unequal blocks. Collective."""
    windows = function.windows_of(arguments)
    dims = arguments[next(iter(windows))].dim()
    names = default_axes(None, dims)
    for extents in _grid_shapes(comm.size, dims):
        shape = {name: extent for name, extent in zip(names, extents, strict=True) if name and extent > 1}
        grid = ProcessGrid(comm, **shape)
        # Unequal input blocks do not match the balanced outputs, so they test the redistribution before the operator.
        for blocks in ("equal blocks", "a first block of one index", "an empty block"):
            distributed = {
                name: scatter(value, _case_distribution(grid, names, value.shape, blocks)) if name in windows else value
                for name, value in arguments.items()
            }
            yield f"grid {grid.describe()}, {blocks}", distributed
            if comm.size == 1:
                break


def _grid_shapes(ranks: int, dims: int) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of blocks for each dimension whose product is the number of ranks."""
    if not dims:
        if ranks == 1:
            yield ()
        return
    for parts in range(1, ranks + 1):
        if ranks % parts == 0:
            yield from ((parts, *rest) for rest in _grid_shapes(ranks // parts, dims - 1))


def _case_distribution(
    grid: ProcessGrid, names: Sequence[str | None], shape: Sequence[int], blocks: str
) -> Distribution:
    bounds = {}
    for name, extent in zip(names, shape, strict=True):
        parts = 1 if name is None else grid.shape[name]
        if name is None or parts == 1 or blocks == "equal blocks":
            continue
        first = min(1, extent) if blocks == "a first block of one index" else 0
        rest = (extent - first) // (parts - 1)
        bounds[name] = (0, *(first + index * rest for index in range(parts - 1)), extent)
    return Distribution(grid, names, boundaries=bounds)
