"""Measurement of operations on one rank, for the table of a machine.

The table maps the key of a :class:`.LocalCall` and a phase to seconds. All ranks measure the same calls at the same
time, each on a block of the size that the call gives. An operation runs as distconv runs it, on distributed tensors, so
that the dispatch is included. The tensors are split over samples, whatever the grid of the call.

Captured steps have less work of Python in each operation: a :class:`.StepMode` selects captured runs of all copies.

Copies of the tensors are used in rotation, because between two uses in a training step all other tensors pass through
the caches. Autograd is called once for all copies, as it is once in a step.

Source: Dryden et al. 2019, V-A (warm-up runs, then the mean of ten) and VI-A.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from mpi4py import MPI
from torch.utils._pytree import tree_map

from distconv.capture.captured import capture
from distconv.communication import gradient_reduction
from distconv.communication.agreement import as_in_later_steps
from distconv.distribution import Distribution
from distconv.grid import ProcessGrid
from distconv.kernels.convolution import (
    Convolution,
    Piece,
    Range,
    assemble_input,
    crop,
    is_below_overlap_threshold,
    is_convolvable_without_copy,
)
from distconv.memory_format import named_format, new_empty
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.candidates import Candidate
from distconv.perfmodel.cost.convolution_pieces import ConvolutionRanges
from distconv.perfmodel.cost.operation_work import PHASES, LocalCall, local_call, work
from distconv.perfmodel.graph.graph import GraphConstant, LayerGraph, Value
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.machine.machine import Roofline
from distconv.perfmodel.machine.step_mode import StepMode
from distconv.tensor import DistTensor

WARM_UP = 2
REPETITIONS = 10
"""Least number of runs after the warm-up, of which the mean is taken (as in Dryden et al. 2019, V-A).

It is rounded up to a multiple of the number of copies.
"""

ROUNDS = 3
"""Repetitions of the full measurement. The fastest counts, since other load can only slow it down."""

DIFFERENCES = 15
"""Number of differences whose median is the fixed cost of an exchange or of a summed gradient."""

CACHE_BYTES = 64 << 20
"""Total size of the copies of the tensors, so that none is found in a cache."""

MAX_COPIES = 5

SUMS = 16
"""Number of weights whose gradients are summed, to measure the cost of each."""

LEAST_S = 1e-7
"""Least seconds of a difference of two times: a call of an operator takes longer."""

LARGE_ELEMENTS = 1 << 24
"""Elements of the sum that measures the memory bandwidth."""

EAGER = StepMode()
"""Contiguous tensors and eager runs."""


def calls_of(
    graph: LayerGraph, candidates: Mapping[str, Sequence[Candidate]], ranks: int, per_node: int
) -> dict[str, LocalCall]:
    """Return the work of a rank in each operation under any candidate of its layer.

    Parameters
    ----------
    graph : LayerGraph
    candidates : mapping of str to sequence
        Candidates of each deciding layer.
    ranks, per_node : int
        Number of ranks, and of ranks of each node.

    Returns
    -------
    dict of str to LocalCall
        By the key of its measured time, each once.
    """
    calls: dict[str, LocalCall] = {}
    for op in graph.operations:
        for candidate in () if op.view else candidates[op.layer]:
            call = local_call(op, AxisParts.from_axes(candidate, ranks, per_node))
            calls.setdefault(call.key, call)
    return calls


def measure(
    calls: Mapping[str, LocalCall],
    comm: MPI.Intracomm,
    device: torch.device,
    rounds: int = ROUNDS,
    mode: StepMode = EAGER,
) -> dict[str, float]:
    """Measure each phase of each call while all ranks compute. Collective: call on every rank.

    Parameters
    ----------
    calls : mapping of str to LocalCall
        The same on all ranks, from :func:`calls_of`.
    comm : MPI.Intracomm
    device : device
    rounds : int
        Repetitions, of which the fastest counts.
    mode : StepMode
        Memory format of the tensors, and eager or captured runs.

    Returns
    -------
    dict of str to float
        Seconds of the slowest rank, by key and phase. Calls that fail on their own are omitted on all ranks.
    """
    found: dict[str, float] = {}
    grid = ProcessGrid(comm, n=comm.size)
    # Rounds are the outer loop, so that a disturbance of some seconds does not affect all repetitions of a call.
    for _ in range(rounds):
        for key, call in calls.items():
            for phase, seconds in _measure_call(call, grid, comm, device, mode):
                found[f"{key} {phase}"] = min(seconds, found.get(f"{key} {phase}", math.inf))
    return found


def _measure_call(
    call: LocalCall, grid: ProcessGrid, comm: MPI.Intracomm, device: torch.device, mode: StepMode
) -> Iterator[tuple[str, float]]:
    # A call may fail on one rank only, for example by lack of memory. All ranks measure it, or none, because a
    # measurement has barriers.
    try:
        runs: dict[str, _Runs] | None = _runs(call, grid, device, mode)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        runs = None
    if comm.allreduce(runs is not None, MPI.LAND) and runs is not None:
        for phase, of in runs.items():
            yield phase, _time_runs(of, comm, device)


def measure_roofline(comm: MPI.Intracomm, device: torch.device, mode: StepMode = EAGER) -> Roofline:
    """Measure FLOP/s, bytes/s and the cost of a kernel while all ranks compute. Collective: call on every rank.

    They follow from a large convolution, a large sum and a tiny ReLU.

    Parameters
    ----------
    comm : MPI.Intracomm
    device : device
    mode : StepMode
        Eager or captured runs; the memory format is that of the convolution.

    Returns
    -------
    Roofline
    """
    grid = ProcessGrid(comm, n=comm.size)
    x, w = (_random(shape, "float32", device, mode=mode) for shape in ((4, 128, 64, 64), (128, 128, 3, 3)))
    large = [torch.rand(LARGE_ELEMENTS, device=device) for _ in range(3)]
    block = torch.rand(1, 64, device=device, requires_grad=True)
    tiny = DistTensor(block, Distribution(grid, ("n", None)), torch.Size((grid.size, 64)))
    macs = x.numel() * w[0].numel()
    convolution = _time_runs(_Runs(lambda: torch.conv2d(x, w, padding=1)), comm, device)
    addition = _time_runs(_Runs(lambda: torch.add(large[0], large[1], out=large[2])), comm, device)
    kernel = _time_runs(_runs_in_mode(lambda: [torch.relu(tiny) for _ in range(SUMS)], SUMS, mode), comm, device)
    return Roofline(2 * macs / convolution, 3 * 4 * LARGE_ELEMENTS / addition, kernel)


def measure_exchange(comm: MPI.Intracomm, device: torch.device, mode: StepMode = EAGER) -> float:
    """Measure the time that a halo exchange adds to a convolution. Collective: call on every rank.

    The halo is short. The result is the mean of one forward and one backward exchange.

    Parameters
    ----------
    comm : MPI.Intracomm
    device : device

    Returns
    -------
    float
        Seconds per exchange.
    """
    shape = (8, 16, 16 * comm.size, 16)
    layers = (torch.nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
    graph = trace(torch.nn.Sequential(*layers), shape)
    call = local_call(graph.operations[1], AxisParts.from_axes({"h": comm.size}, comm.size, comm.size))
    grid = ProcessGrid(comm, h=comm.size)
    block = _random((8, 16, 16, 16), "float32", device, True, mode)
    x = DistTensor(block, Distribution(grid, ("n", "c", "h", "w")), torch.Size(shape))
    weight = _random((16, 16, 3, 3), "float32", device, mode=mode)
    error = _random((8, 16, 16, 16), "float32", device, mode=mode)
    runs = _runs(call, grid, device, mode)

    def exchange() -> object:
        return torch.autograd.grad(torch.conv2d(x, weight, padding=1).local, block, error)  # type: ignore[attr-defined]

    exchanging = _runs_in_mode(exchange, 1, mode)

    # Differences of times that are measured close together: the machine's speed changes more slowly.
    def difference() -> float:
        computing = sum(_time_runs(runs[phase], comm, device) for phase in ("forward", "input"))
        return (_time_runs(exchanging, comm, device) - computing) / 2

    return max(0.0, statistics.median(difference() for _ in range(DIFFERENCES)))


def measure_sum(comm: MPI.Intracomm, device: torch.device, mode: StepMode = EAGER) -> float:
    """Measure the time that the sum over all ranks adds to a gradient. Collective: call on every rank.

    The gradient is small, so the result is the work of the host alone.

    Parameters
    ----------
    comm : MPI.Intracomm
    device : device

    Returns
    -------
    float
        Seconds per gradient.
    """
    grid = ProcessGrid(comm, n=comm.size)
    dist = Distribution(grid, ("n", None))
    x = DistTensor(torch.rand(1, 16, device=device), dist, torch.Size((comm.size, 16)))
    weights = [torch.full((16, 16), 1 / 16, device=device, requires_grad=True) for _ in range(SUMS)]
    for weight in weights:
        gradient_reduction.defer_grad_reduction(weight, "a weight")

    def backward() -> None:
        y = x
        for weight in weights:
            y = torch.nn.functional.linear(y, weight)  # type: ignore[assignment]
        y.local.sum().backward()

    def alone() -> None:
        with gradient_reduction.no_sync():
            backward()
        gradient_reduction.set_unsynced_grads([])

    def difference() -> float:
        return (_time_runs(summing, comm, device) - _time_runs(local, comm, device)) / SUMS

    # Pending gradients of the caller must neither take part in the measured sums nor get lost.
    kept = gradient_reduction.unsynced_grads()
    gradient_reduction.set_unsynced_grads([])
    summing, local = (_runs_in_mode(each, 1, mode, weights) for each in (backward, alone))
    found = statistics.median(difference() for _ in range(DIFFERENCES))
    gradient_reduction.set_unsynced_grads(kept)
    return max(0.0, found)


@dataclass(frozen=True)
class _Runs:
    """``count`` runs of a piece of work, one after the other, each on its own tensors."""

    take: Callable[[], object]
    count: int = 1
    less: Callable[[], object] | None = None
    """Work whose time is subtracted: the forward pass, where ``take`` runs both passes."""


def _runs_in_mode(take: Callable[[], object], count: int, mode: StepMode, leaves: Sequence[torch.Tensor] = ()) -> _Runs:
    """Return eager or captured runs, after each of which the gradients of ``leaves`` are removed."""
    return _Runs(_in_mode(take, mode, leaves), count)


def _in_mode(take: Callable[[], object], mode: StepMode, leaves: Sequence[torch.Tensor] = ()) -> Callable[[], object]:
    """Return an eager or captured run. Its results stay alive until the next run, as they do in a training step."""
    # A captured step must not return a result that requires a backward pass.
    action = capture(lambda: tree_map(_detach, take()), check_every=0) if mode.captured else take
    results: list[object] = []

    def run() -> None:
        # The old results are freed first, so that the new ones can take their memory.
        results.clear()
        results.append(action())
        for leaf in leaves:
            leaf.grad = None

    return run


def _detach(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _time_runs(runs: _Runs, comm: MPI.Intracomm, device: torch.device) -> float:
    """Return the mean seconds of at least ten runs, on the slowest rank. Collective."""
    seconds = _mean_seconds(runs.take, runs.count, comm, device)
    if runs.less is None:
        return seconds
    return max(seconds - _mean_seconds(runs.less, runs.count, comm, device), LEAST_S)


def _mean_seconds(take: Callable[[], object], count: int, comm: MPI.Intracomm, device: torch.device) -> float:
    """Return the mean seconds of runs, ``count`` in each call of ``take``. In a step all ranks wait for the slowest."""
    with as_in_later_steps():
        for _ in range(-(-WARM_UP // count)):
            take()
        # First the device, then the barrier: otherwise the warm-up of a slower rank would be measured as well.
        _finish(device)
        comm.Barrier()
        start = time.perf_counter()
        times = -(-REPETITIONS // count)
        for _ in range(times):
            take()
        _finish(device)
    return float(comm.allreduce((time.perf_counter() - start) / (times * count), MPI.MAX))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _CallCopy:
    """Arguments of a call as separate tensors. Only those that ``phase`` differentiates require a gradient.

    BPx differentiates the inputs, and the weights as well if BPw is not measured separately.
    """

    def __init__(self, call: LocalCall, phase: str, grid: ProcessGrid, device: torch.device, mode: StepMode) -> None:
        op = call.operation
        weights = phase != "input" or not work(call, "weight").kernels
        # A captured run must not use a graph from outside of it: its forward pass has no gradients, and a run of both
        # passes copies what the operation changes in place.
        inputs = phase != "weight" and not (mode.captured and phase == "forward")
        self.copies = mode.captured and op.in_place and phase != "forward"
        # tree_map visits the tensors of args, then those of kwargs: the order in which the trace recorded the inputs.
        values = iter(zip(op.inputs, call.inputs, strict=True))
        constants = {
            constant: _random(shape, constant.dtype, device, weights and constant.trained, mode)
            for constant, shape in zip(op.constants, call.constants, strict=True)
        }
        self.leaves = [tensor for tensor in constants.values() if tensor.requires_grad]
        for weight in self.leaves:
            gradient_reduction.defer_grad_reduction(weight, f"a weight of {op.kind}")

        def tensor(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                value, shape = next(values)
                copy = _random(shape, value.dtype, device, value.requires_grad and inputs, mode)
                self.leaves += [copy] if copy.requires_grad else []
                full_shape = torch.Size((shape[0] * grid.size, *shape[1:]) if shape else ())
                dist = Distribution(grid, ("n", *(None,) * (len(shape) - 1)) if shape else ())
                # autograd does not allow in-place changes of leaves.
                return DistTensor(copy.clone() if op.in_place and not self.copies else copy, dist, full_shape)
            return constants[leaf] if isinstance(leaf, GraphConstant) else leaf

        args = tree_map(tensor, op.args, is_leaf=_is_tensor)
        self.kwargs = tree_map(tensor, dict(op.kwargs), is_leaf=_is_tensor)
        # Channels are local, and so is the number of groups: argument 6 of convolutions, transposed ones included.
        if op.kind.startswith("conv") and len(args) > 6:
            args = (*args[:6], call.groups, *args[7:])
        self.args = args
        if "groups" in self.kwargs:
            self.kwargs["groups"] = call.groups
        self.function = op.function

    def forward(self) -> object:
        """Run the operation."""
        args = tree_map(_copy, self.args) if self.copies else self.args
        return self.function(*args, **self.kwargs)


def _copy(leaf: object) -> object:
    return leaf.clone() if isinstance(leaf, DistTensor) else leaf


def _both_passes(copies: Sequence[_CallCopy]) -> Callable[[], object]:
    """Return a function that runs the forward pass, and then computes the gradients, which stay local."""
    errors, kept = [torch.rand_like(copy.forward().local) for copy in copies], gradient_reduction.unsynced_grads()  # type: ignore[attr-defined]

    def run() -> object:
        results = [copy.forward().local for copy in copies]  # type: ignore[attr-defined]
        with gradient_reduction.no_sync():
            torch.autograd.backward(results, errors)
        gradient_reduction.set_unsynced_grads(kept)
        return results

    return run


def _backward(copies: Sequence[_CallCopy]) -> Callable[[], object]:
    """Return a function that computes the gradients. Weight gradients stay local; their all-reduce is BPa."""
    results = [copy.forward().local for copy in copies]  # type: ignore[attr-defined]
    errors, kept = [torch.randn_like(result) for result in results], gradient_reduction.unsynced_grads()

    # The graph is kept for the next run.
    def run() -> None:
        with gradient_reduction.no_sync():
            torch.autograd.backward(results, errors, retain_graph=True)
        gradient_reduction.set_unsynced_grads(kept)

    return run


class _BlockConvolution:
    """Convolution of the owned block and the received blocks, as :mod:`distconv.layers` runs it."""

    def __init__(
        self, call: LocalCall, pieces: ConvolutionRanges, phase: str, device: torch.device, mode: StepMode
    ) -> None:
        op, window = call.operation, call.operation.window
        assert window is not None
        self.phase = phase
        self.work = Convolution(window, call.groups, pieces.out, pieces.needed[0])
        samples, kind = call.inputs[0][0], op.x.dtype

        def piece(box: tuple[Range, ...]) -> Piece:
            return Piece(_random((samples, *(b - a for a, b in box)), kind, device, mode=mode), box)

        self.pieces = [piece(pieces.own), *(piece(box) for box in pieces.ghosts())]
        # at_once: gradients come from the assembled input. free: pieces are convolved without assembling the input.
        self.at_once = is_below_overlap_threshold(call.inputs[0], call.constants[0], on_gpu=device.type == "cuda")
        self.free = not self.at_once and is_convolvable_without_copy(pieces.own[1:], pieces.out, window)
        space = (window.needed(dim, out) for dim, out in enumerate(pieces.out))
        self.needed = (pieces.needed[0], *space)
        self.weight = _random(call.constants[0], kind, device, mode=mode)
        self.bias = _random(call.constants[1], kind, device) if len(call.constants) > 1 else None
        shape = (samples, call.constants[0][0], *(b - a for a, b in pieces.out))
        self.error = _random(shape, kind, device, mode=mode)

    def forward(self) -> object:
        """Run FP: the owned block and the received blocks one by one, or the assembled input."""
        first, *others = self._pieces()
        return self.work.add(self.work.forward(first, self.weight, self.bias), others, self.weight)

    def _pieces(self) -> list[Piece]:
        return self.pieces if self.free else [assemble_input(self.pieces, self.needed)]

    def backward(self) -> Callable[[], object]:
        """Return a function that computes BPw or BPx."""
        if self.at_once:
            return partial(self._gradients_at_once, self._pieces()[0])
        if self.phase == "weight":
            return lambda: self.work.parameter_gradients(
                self.error, self._pieces(), self.weight, bias=self.bias is not None
            )
        return self._input_gradients

    def _gradients_at_once(self, assembled: Piece) -> object:
        """Compute gradients from the assembled input, which the forward pass has kept."""
        weights = self.phase == "weight"
        wanted = (not weights, weights, weights and self.bias is not None)
        dx, *contributions = self.work.gradients(self.error, assembled, self.weight, wanted)
        return contributions if dx is None else [crop(Piece(dx, assembled.box), piece.box) for piece in self.pieces]

    def _input_gradients(self) -> object:
        if self.free:
            return [self.work.input_gradient(self.error, piece, self.weight) for piece in self.pieces]
        # The gradient does not depend on the values of the input.
        blank = Piece(new_empty(self.error, (self.error.shape[0], *(b - a for a, b in self.needed))), self.needed)
        dx = Piece(self.work.input_gradient(self.error, blank, self.weight), self.needed)
        return [crop(dx, piece.box) for piece in self.pieces]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, (Value, GraphConstant))


def _random(
    shape: Sequence[int], dtype: str, device: torch.device, requires_grad: bool = False, mode: StepMode = EAGER
) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if not kind.is_floating_point:
        return torch.ones(tuple(shape), dtype=kind, device=device)
    values = torch.rand(tuple(shape), dtype=kind, device=device)
    return values.contiguous(memory_format=named_format(mode.memory_format, len(shape))).requires_grad_(requires_grad)


def _runs(call: LocalCall, grid: ProcessGrid, device: torch.device, mode: StepMode = EAGER) -> dict[str, _Runs]:
    """Return the runs of each phase of a call, each of which has run once.

    A call that cannot run alone therefore raises here, before the ranks communicate.
    """
    size = sum(v.itemsize * math.prod(s) for v, s in zip(call.operation.inputs, call.inputs, strict=True))
    count = max(2, min(MAX_COPIES, CACHE_BYTES // max(1, 2 * size)))
    phases = [phase for phase in PHASES if work(call, phase).kernels]
    runs = {phase: _runs_of_phase(call, phase, count, grid, device, mode=mode) for phase in phases}
    for of in runs.values():
        of.take()
    return runs


def _runs_of_phase(
    call: LocalCall, phase: str, count: int, grid: ProcessGrid, device: torch.device, *, mode: StepMode
) -> _Runs:
    """Return runs of a phase of ``count`` copies of a call."""
    if call.pieces is not None:
        pieces = [_BlockConvolution(call, call.pieces, phase, device, mode) for _ in range(count)]
        each = [piece.forward if phase == "forward" else piece.backward() for piece in pieces]
        return _runs_in_mode(lambda: [run() for run in each], count, mode)
    copies = [_CallCopy(call, phase, grid, device, mode) for _ in range(count)]
    leaves = [leaf for copy in copies for leaf in copy.leaves]

    def forward() -> object:
        return [copy.forward() for copy in copies]

    if phase == "forward":
        return _runs_in_mode(forward, count, mode)
    if mode.captured:
        return _Runs(_in_mode(_both_passes(copies), mode, leaves), count, _in_mode(forward, mode))
    return _runs_in_mode(_backward(copies), count, mode, leaves)
