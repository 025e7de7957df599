"""``dc.capture``: recording of a step, selection of a recording at each call, comparison with the eager step.

At each call all ranks agree on the recording to replay (:meth:`Captured.__call__`): those that record send other
messages than those that replay. Users call :func:`capture`; the other modules of this package do the work.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from distconv import recording
from distconv.capture.buffer_plan import below_autograd
from distconv.capture.gradients import get_gradient, set_gradient
from distconv.capture.graph import CudaGraphReplay, find_unsupported, fold_host_constants
from distconv.capture.guards import (
    ArgumentGuard,
    ModuleGuard,
    TensorGuard,
    block_of,
    current_modes,
    describe_mode_change,
)
from distconv.capture.outcome import StepOutcome, StepSnapshot
from distconv.capture.replay_code import ReplayCode
from distconv.capture.run import CaptureRun, StepResult, rebuild_results, record_run
from distconv.communication import agreement, gradient_reduction
from distconv.errors import CaptureError, UnsupportedOperation
from distconv.process import watchdog
from distconv.tensor import DistTensor

ON_CHANGE = ("raise", "record")

_WARM_UP_RUNS = 2
"""Runs before the recorded one. They fill caches and determine the order of gradient reductions."""

_MAX_RECORDINGS = 8
"""Maximum number of recordings of a step. Earlier ones are replayed if their arguments, modules and modes return."""

_RECORDED_OFTEN = (
    "dc.capture: this is recording number {} of a step, since {}. Only the last {} recordings are kept, and a step "
    "that is recorded often is slower than an eager one. Call it with fewer shapes and modes, or do not capture it"
)

_NOT_BITWISE = (
    "dc.capture: {} is not bitwise identical after a replay and after the eager step. Some GPU kernels add in no fixed "
    "order, so two eager steps may differ, too: only half of the digits are compared. Call "
    "torch.use_deterministic_algorithms(True) to compare all bits"
)

_failed_replays: list[CaptureReplay] = []
"""Replays that failed. They are kept alive, since their messages may be in flight and use their memory."""


class Captured:
    """A callable that replays a step, or records it if no recording fits. :func:`capture` returns it.

    Parameters
    ----------
    function, check_every, on_change
        As in :func:`capture`.
    example : sequence
        Positional arguments for the first recording.
    """

    def __init__(self, function: Callable[..., Any], example: Sequence[Any], check_every: int, on_change: str) -> None:
        self.__wrapped__ = function
        self._check_every, self._on_change = check_every, on_change
        self._replays: dict[int, CaptureReplay] = {}
        """Replays by number. Numbers are the same on all ranks."""
        self._recording_count = 0
        """Number of recordings that were made, and so the number of the newest one."""
        self._pool: Any = None
        """Memory pool that all CUDA graphs share, since only one of them runs at a time."""
        distributed = [leaf for leaf in tree_leaves(tuple(example)) if isinstance(leaf, DistTensor)]
        self._world: Any = distributed[0].grid.world if distributed else None
        """Ranks that agree on each call: those of the first DistTensor, else the largest group that the step uses."""
        self._add_recording(example)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Replay the step, with the results and side effects on tensors of ``function(*args, **named)``.

        Collective: call on every rank.

        Raises
        ------
        CaptureError
            On all ranks, if a guard fails on any of them, or a check finds a difference from the eager step.
        """
        if recording.active is not None:  # This step is part of another one, which is being recorded.
            return self.__wrapped__(*args, **named)
        args = self._bind_positional(args, named) if named else args
        leaves, spec = tree_flatten(args)
        number, change, may_record = self._select_recording(args, leaves, spec)
        if not self._is_same_on_all_ranks(number):
            # All ranks come here, or none: what they have compared is the same on all of them.
            self._check_recording_allowed(change, may_record)
            if self._recording_count == _MAX_RECORDINGS:
                reason = change or "another rank needs it"
                warnings.warn(_RECORDED_OFTEN.format(_MAX_RECORDINGS + 1, reason, _MAX_RECORDINGS), stacklevel=2)
            number = self._add_recording(args)
        replay = self._replays[number]
        replay.calls += 1
        if self._check_every and (replay.calls == 1 or replay.calls % self._check_every == 0):
            return self._replay_and_compare(number, args, leaves)
        return self._replay(number, leaves)

    def _bind_positional(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
        bound = inspect.signature(self.__wrapped__).bind(*args, **named)
        if bound.kwargs:
            raise CaptureError(
                f"a captured step: {', '.join(bound.kwargs)} can only be passed by name, but the example of dc.capture "
                "is positional. Make it a positional parameter of the function"
            )
        return bound.args

    def _replay(self, number: int, leaves: Sequence[Any]) -> Any:
        try:
            return self._replays[number](leaves)
        # Of any class: messages may be in flight after a KeyboardInterrupt, too.
        except BaseException:
            _failed_replays.append(self._replays.pop(number))
            raise

    def _select_recording(self, args: Sequence[Any], leaves: Sequence[Any], spec: TreeSpec) -> tuple[int, str, bool]:
        """Return the recording to replay, the guard failure, and True if a new recording is always allowed.

        It is the newest recording whose guards pass, or -1 if all of them fail. The guard failure is that of the newest
        recording.
        """
        first: tuple[str, bool] | None = None
        # The newest first: most likely it fits, and its guard failure is the one that helps the user.
        for number in sorted(self._replays, reverse=True):
            change = self._replays[number].describe_change(args, leaves, spec)
            if change is None:
                return number, "", True
            first = first or change
        return -1, *(first or ("", True))

    def _is_same_on_all_ranks(self, number: int) -> bool:
        """Return True if all ranks replay the same recording. One allreduce of 16 bytes."""
        if self._world.size == 1:
            return number >= 0
        # Even with DISTCONV_CHECK=off: ranks that record again send other messages than ranks that replay, and would
        # deadlock.
        agreement.check_communicator(self._world, "a captured step")
        mismatches = agreement.find_mismatches(self._world, np.array([number]), lambda: "agreement on a captured step")
        return number >= 0 and not mismatches[0]

    def _check_recording_allowed(self, change: str, may_record: bool) -> None:
        with watchdog.waiting(lambda: "what has changed for a captured step"):
            changes = self._world.allgather((change, may_record))
        failures = [(rank, text) for rank, (text, allowed) in enumerate(changes) if text and not allowed]
        if failures and self._on_change == "raise":
            ranks = ", ".join(str(rank) for rank, text in failures if text == failures[0][1])
            raise CaptureError(
                f"a captured step differs from its recording: {failures[0][1]} (rank {ranks}). Capture it again, or "
                'pass on_change="record" to dc.capture'
            )

    def _add_recording(self, args: Sequence[Any]) -> int:
        """Record the step for ``args`` and return the number of the recording, the same on all ranks. Collective."""
        replay = CaptureReplay(self._record(args), args)
        agreement.try_on_all_ranks(self._world, lambda: self._capture_graph(replay, args), CaptureError)
        # Numbers are the same on all ranks, so all of them drop the same recording.
        if len(self._replays) >= _MAX_RECORDINGS:
            del self._replays[min(self._replays)]
        self._recording_count += 1
        self._replays[self._recording_count] = replay
        return self._recording_count

    def _capture_graph(self, replay: CaptureReplay, args: Sequence[Any]) -> None:
        if replay.run.recording.gpu is not None:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            replay.capture_graph(args, self._pool)

    def _record(self, args: Sequence[Any]) -> CaptureRun:
        # Each run is undone. The last one is the recording.
        for _ in range(1 + _WARM_UP_RUNS):
            run = record_run(self.__wrapped__, args)
        self._world = self._world or max(run.recording.comms(), key=lambda comm: comm.size, default=MPI.COMM_SELF)
        reasons = [*run.recording.unsupported, *(find_unsupported(run.recording) if run.recording.gpu else ())]

        def check() -> None:
            if reasons:
                raise CaptureError(f"this step cannot be captured: {reasons[0]}")

        agreement.try_on_all_ranks(self._world, check, CaptureError)
        return run

    def _replay_and_compare(self, number: int, args: Sequence[Any], leaves: Sequence[Any]) -> Any:
        """Run the eager step, undo it, replay it, and compare. Collective."""
        replay, blocks = self._replays[number], _blocks(leaves)
        before = StepSnapshot(replay.run, blocks)
        expected = StepOutcome(replay.run, blocks, self.__wrapped__(*args))
        before.restore()
        result = self._replay(number, leaves)
        outcome = StepOutcome(replay.run, blocks, result)
        wrong = outcome.first_difference(expected)
        varies = replay.run.recording.gpu is not None and not torch.are_deterministic_algorithms_enabled()
        # The eager step sends messages: if one rank needs a second one to compare with, all take it.
        if agreement.allreduce_max(self._world, int(varies and bool(wrong)), "check of a captured step"):
            before.restore()
            again = StepOutcome(replay.run, blocks, self.__wrapped__(*args))
            before.restore()
            result = self._replay(number, leaves)
            if varies and wrong:
                warnings.warn(_NOT_BITWISE.format(wrong), stacklevel=3)
                wrong = outcome.first_significant_difference(expected, again)

        def check() -> None:
            if wrong:
                raise CaptureError(
                    f"replay {replay.calls} of a captured step differs from the eager step: {wrong} is not the same. A "
                    "Python value that is a constant of the recording has changed, such as a learning rate, a counter "
                    "or a global variable. Pass it as an argument"
                )

        try:
            agreement.try_on_all_ranks(self._world, check, CaptureError)
        except CaptureError:
            before.restore()  # the caller may take the step eagerly
            raise
        return result


class CaptureReplay:
    """A recording, its guards, and the generated code or CUDA graph that replays it."""

    def __init__(self, run: CaptureRun, args: Sequence[Any]) -> None:
        self.run, self.calls = run, 0
        leaves, spec = tree_flatten(tuple(args))
        self._modes, self._arguments = current_modes(), ArgumentGuard(leaves, spec)
        other_leaves = [leaf for number, leaf in enumerate(run.before.leaves) if number not in run.arguments]
        self._guards = (ModuleGuard(run.modules), TensorGuard([*run.existing_tensors(), *other_leaves]), run.optimizers)
        self._gradients = self._gradient_kinds(_blocks(leaves))
        self._comms = run.recording.comms()
        self._result_count = sum(isinstance(each, StepResult) for each in run.results)
        self._recording = run.recording if run.recording.gpu is None else fold_host_constants(run.recording)
        self._program = ReplayCode(self._recording, run.outputs(), run.gradient_slots(), len(run.before.values))
        self._run_recording: Callable[[Sequence[Any], Sequence[torch.Tensor | None]], Sequence[torch.Tensor]]
        self._run_recording = self._program.replay

    def capture_graph(self, args: Sequence[Any], pool: Any) -> None:
        """Capture the generated code as a CUDA graph, which later calls replay.

        Parameters
        ----------
        args : sequence
            Example arguments.
        pool : object
            Memory pool of the graph, as ``torch.cuda.graph_pool_handle`` returns it.
        """
        blocks = _blocks(tree_leaves(tuple(args)))
        example = blocks, self._gradients_before(blocks)
        self._run_recording = CudaGraphReplay(self._program, self._recording, example, self.run.generators, pool).replay

    def describe_change(self, args: Sequence[Any], leaves: Sequence[Any], spec: TreeSpec) -> tuple[str, bool] | None:
        """Return the guard failure, and True if a new recording is always allowed; None if all guards pass.

        Parameters
        ----------
        args : sequence
            Arguments of a call.
        leaves, spec
            The leaves and the structure of their tree.

        Returns
        -------
        tuple of (str, bool) or None
        """
        text = describe_mode_change(self._modes) or self._arguments.describe_change(args, leaves, spec)
        text = text or next(filter(None, (guard.describe_change() for guard in self._guards)), "")
        if text:
            return text, False
        if self._gradient_kinds(_blocks(leaves)) != self._gradients:
            return "the gradients that are None are not those of the recording", True
        return None

    def _gradient_kinds(self, blocks: Sequence[Any]) -> Any:
        grads = map(get_gradient, self.run.leaves(blocks))
        # Not their strides: generated code makes no views of gradients by a recorded geometry.
        kept = [(id(leaf), comm.handle) for leaf, _, comm in gradient_reduction.unsynced_grads()]
        return [None if grad is None else (grad.dtype, grad.layout) for grad in grads], kept

    def _gradients_before(self, blocks: Sequence[Any]) -> list[torch.Tensor | None]:
        kept = gradient_reduction.unsynced_grads()
        return [*map(get_gradient, self.run.leaves(blocks)), *(grad for _, grad, _ in kept)]

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Replay the step for these leaves of the arguments, and return its results. Collective."""
        # Before the first message: the communicators may have been freed with their grid.
        for comm in self._comms:
            agreement.check_communicator(comm, "the replay of a step")
        blocks, run = _blocks(leaves), self.run
        with torch.no_grad(), below_autograd():
            tensors = [tensor.detach() for tensor in self._run_recording(blocks, self._gradients_before(blocks))]
        # The order of CaptureRun.outputs: results, gradients, contributions that no_sync keeps.
        rest = iter(tensors[self._result_count :])
        grad_leaves = run.leaves(blocks)
        for number, slot in run.gradients:
            set_gradient(grad_leaves[number], None if slot is None else next(rest))
        if run.unsynced or run.before.unsynced:
            gradient_reduction.set_unsynced_grads([(leaf, next(rest), comm) for leaf, _, comm in run.unsynced])
        return rebuild_results(run, tensors[: self._result_count])


def _blocks(leaves: Sequence[Any]) -> list[Any]:
    return [block_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def capture(
    function: Callable[..., Any], *example: Any, check_every: int = 1000, on_change: str = "raise"
) -> Callable[..., Any]:
    """Record a training step, and return a callable that replays it with bitwise identical results.

    Collective: call on every rank.

    ``function`` runs three times with ``example``. The last run is recorded below Python's dispatch: torch's operators
    on this rank's blocks, messages, and all-reduces. Gradients, buffers and random generators are restored afterwards.
    A replay changes them as the step does. Arguments and results are trees (lists, tuples, dictionaries, dataclasses
    registered by ``torch.export.register_dataclass``) of tensors and plain values.

    Parameters
    ----------
    function : callable
        The step: forward, loss, ``backward()``, or a part of it.
    *example
        Arguments like those of later calls: equal in structure, shapes, dtypes, distributions and plain values.
    check_every : int
        The first replay and every replay whose number is a multiple of ``check_every`` are compared with the eager
        step, bit for bit, on all ranks. 0 compares none.
    on_change : {"raise", "record"}
        Action if a guard fails, such as after a change of a shape or ``model.eval()``: raise CaptureError, or record
        the step again and keep the earlier recordings.

    Returns
    -------
    callable
        Takes arguments like ``example``, positional or by name. It raises CaptureError on all ranks if a guard or a
        check fails on any rank. Collective: call on every rank.

    Raises
    ------
    CaptureError
        On all ranks, with the line, if the step reads values in Python (``item()``, ``if loss > 1``, a print), has
        shapes that depend on values, needs state that does not exist yet (an optimizer's first step), or uses sparse
        tensors or ``torch.distributed``.
    UnsupportedOperation
        If ``check_every`` is negative or ``on_change`` is not a valid value.

    Warnings
    --------
    ``function`` must depend only on its arguments, on the parameters, buffers and gradients of the modules that it
    calls, and on torch's random generators. **Every other Python value that it reads is a constant of the recording.**
    Every other Python value that it sets is set while the step is recorded or checked, but not in replays. Between two
    checks a replay silently uses the old value.

    Examples
    --------
    >>> step = dc.capture(step, x, t)   # doctest: +SKIP
    >>> loss = step(x, t)               # doctest: +SKIP
    """
    if on_change not in ON_CHANGE:
        raise UnsupportedOperation(f"capture: on_change={on_change!r} must be one of {', '.join(ON_CHANGE)}")
    if not isinstance(check_every, int) or check_every < 0:
        raise UnsupportedOperation(f"capture: check_every={check_every!r} must be 0 or a positive integer")
    return Captured(function, example, check_every, on_change)
