"""``dc.capture``: a step that is recorded once and replayed, bit for bit."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from distconv import recording
from distconv.capture import state
from distconv.capture.entries import Refusal
from distconv.capture.graph import Graph, on_gpu, unfit
from distconv.capture.outcome import Memory, Outcome, digests
from distconv.capture.placement import below_autograd
from distconv.capture.program import Program
from distconv.capture.step.differences import difference
from distconv.capture.step.independence import dependence, forget, unfitting
from distconv.capture.step.run import Result, Run, recorded
from distconv.capture.watch.arguments import Arguments, block_of
from distconv.capture.watch.executed import Executed
from distconv.capture.watch.modules import Modules, Tensors
from distconv.capture.watch.references import References
from distconv.capture.watch.structures import flattened, mapped
from distconv.communication import agreement, gradient_reduction
from distconv.errors import CaptureError, UnsupportedOperation
from distconv.process import watchdog
from distconv.tensor import DistTensor

ON_CHANGE = ("raise", "record")

_RUNS = 4
"""Runs in which a step must have done the same twice: caches are filled in the first ones."""

_NO_ORDER = (
    "{} has other bits after a replay than after the step, as it may after each step on a GPU, some of whose kernels "
    "add in no fixed order: compared are half of the digits; all are with torch.use_deterministic_algorithms(True)"
)

_KEPT = 8
"""Recordings of a step that are kept, for inputs, modules and settings that come again."""


_OFTEN = (
    "a captured step is recorded for time number {}, since {}: only the last ones are kept, and a step that is "
    "recorded often is slower than an eager one"
)


class Captured:
    """A step that is replayed: call it with arguments as those of the example. :func:`capture` makes it."""

    def __init__(self, function: Callable[..., Any], example: Sequence[Any], check: bool, on_change: str) -> None:
        self.__wrapped__ = function
        self._check, self._on_change = check, on_change
        self._replays: dict[int, _Replay] = {}
        """By their numbers, which are the same on all ranks."""
        self._recorded = 0
        self._pool: Any = None
        """Memory that graphs share, since one of them is replayed at a time."""
        self._world: Any = _world(example, References(function).values)
        self._add(example)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """What ``function(*args, **named)`` returns and leaves, by a replay. Collective.

        Raises
        ------
        CaptureError
            On all ranks, if anything that the recording depends on has changed on any of them.
        """
        if recording.active is not None:  # It is a part of another step, which is recorded.
            return self.__wrapped__(*args, **named)
        args = self._placed(args, named) if named else args
        leaves = list(flattened(args))
        number, why = self._fitting(args, leaves)
        if not self._everywhere(number):
            self._permit(why)
            if self._recorded == _KEPT:
                warnings.warn(_OFTEN.format(_KEPT + 1, why.text or "other ranks need it"), stacklevel=2)
            number = self._add(args)
        replay = self._replays[number]
        if not replay.checked and self._check:
            return self._checked(number, args, leaves)
        return self._replayed(number, leaves)

    def _placed(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """All arguments in the order of the function's."""
        bound = inspect.signature(self.__wrapped__).bind(*args, **named)
        if bound.kwargs:
            raise CaptureError(
                f"a captured step takes its arguments by their places, as its example does: {', '.join(bound.kwargs)} "
                "cannot be one of them; let a function with a place for it call the step"
            )
        return bound.args

    def _replayed(self, number: int, leaves: Sequence[Any]) -> Any:
        try:
            return self._replays[number](leaves)
        except BaseException:
            # Its messages may still be under way, in memory that it has.
            _abandoned.append(self._replays.pop(number))
            raise

    def _fitting(self, args: Sequence[Any], leaves: Sequence[Any]) -> tuple[int, _Change]:
        """The number of the recording that serves, or -1, and what has changed for the last one."""
        mismatch = _Change("", False)
        for number in sorted(self._replays, reverse=True):
            change = self._replays[number].change(args, leaves)
            if change is None:
                return number, mismatch
            mismatch = mismatch if mismatch.text else change
        return -1, mismatch

    def _everywhere(self, number: int) -> bool:
        """Whether all ranks have the same recording, which serves. One message of 16 bytes."""
        if self._world.size == 1:
            return number >= 0
        # With DISTCONV_CHECK=off, too: a rank that records again sends other messages than those that replay.
        agreement.check_usable(self._world, "a captured step")
        apart = agreement.apart(self._world, np.array([number]), lambda: "agreement on a captured step")
        return number >= 0 and not apart[0]

    def _permit(self, why: _Change) -> None:
        """Raise on all ranks unless it may be recorded anew."""
        with watchdog.waiting(lambda: "what has changed for a captured step"):
            changes = self._world.allgather((why.text, why.allowed))
        refused = [(rank, text) for rank, (text, allowed) in enumerate(changes) if text and not allowed]
        if refused and self._on_change == "raise":
            ranks = ", ".join(str(rank) for rank, text in refused if text == refused[0][1])
            raise CaptureError(
                f"a captured step is not what was recorded: {refused[0][1]} (rank {ranks}); capture it anew, or pass "
                'on_change="record"'
            )

    def _add(self, args: Sequence[Any]) -> int:
        """Record the step for ``args``; the number of the recording, which is the same on all ranks."""
        replay = _Replay(*self._record(args), args)
        agreement.together(self._world, lambda: self._on_gpu(replay, args), CaptureError)
        if len(self._replays) >= _KEPT:
            del self._replays[min(self._replays)]
        self._recorded += 1
        self._replays[self._recorded] = replay
        return self._recorded

    def _on_gpu(self, replay: _Replay, args: Sequence[Any]) -> None:
        if replay.run.recording.gpu is not None:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            replay.become_graph(args, self._pool)

    def _record(self, args: Sequence[Any]) -> tuple[Run, References]:
        """Runs until one did what the one before did, and what it depends on that is no tensor."""
        executed = Executed()
        run, unlike = recorded(self.__wrapped__, args, References(self.__wrapped__), executed), "it has run once"
        references = References(self.__wrapped__, executed.functions(), {type(each) for each in run.modules})
        for _ in range(_RUNS - 1):
            held = run.held()
            values = digests(held)
            before, run = run, recorded(self.__wrapped__, args, references, modules=run.modules)
            if digests(held) != values:
                run.recording.refusals.append(Refusal("an operator changes memory without a word", "somewhere"))
            self._world = self._world or _largest(run)
            unlike = difference(before, run)
            if not self._any(bool(unlike)):
                break
        if not self._any(bool(unlike or run.recording.refusals)):
            again = partial(recorded, self.__wrapped__, args, references, modules=run.modules)
            unlike = dependence(run, again, self._any)
        set_attribute = references.set_by_the_step()
        reasons = [f"{each.line}: {each.reason}" for each in run.recording.refusals]
        reasons += [f"{each.line}: {each.reason}" for each in unfit(run.recording)] if run.recording.gpu else []
        reasons += [unlike] if unlike else []
        reasons += [f"the step sets {set_attribute}, which a replay does not: return it"] if set_attribute else []

        def check() -> None:
            if reasons:
                raise CaptureError(f"this step cannot be recorded: {reasons[0]}")

        agreement.together(self._world, check, CaptureError)
        return run, references

    def _any(self, here: bool) -> bool:
        return bool(agreement.largest(self._world, int(here), "recording of a step"))

    def _checked(self, number: int, args: Sequence[Any], leaves: Sequence[Any]) -> Any:
        """A replay, once it has given what the eager step gives."""
        replay, blocks = self._replays[number], _blocks(leaves)
        before = Memory(replay.run, blocks)
        expected = Outcome(replay.run, blocks, self.__wrapped__(*args))
        before.put_back()
        result = self._replayed(number, leaves)
        outcome = Outcome(replay.run, blocks, result)
        wrong = outcome.difference(expected)
        varies = replay.run.recording.gpu is not None and not torch.are_deterministic_algorithms_enabled()
        if self._any(varies and bool(wrong)):
            before.put_back()
            again = Outcome(replay.run, blocks, self.__wrapped__(*args))
            before.put_back()
            result = self._replayed(number, leaves)
            if varies and wrong:
                warnings.warn(_NO_ORDER.format(wrong), stacklevel=3)
                wrong = outcome.far_from(expected, again)

        def check() -> None:
            if wrong:
                raise CaptureError(f"the replay of a step gives other numbers than the step: {wrong} is different")

        try:
            agreement.together(self._world, check, CaptureError)
        except CaptureError:
            before.put_back()  # whoever takes the step eagerly then finds what was there before
            raise
        replay.checked = True
        return result


_abandoned: list[_Replay] = []
"""Replays that have failed."""


class _Change:
    """What is not as it was recorded; ``allowed`` to be recorded anew."""

    def __init__(self, text: str, allowed: bool) -> None:
        self.text, self.allowed = text, allowed


class _Replay:
    """A recording, what it depends on, and the program that replays it."""

    def __init__(self, run: Run, references: References, args: Sequence[Any]) -> None:
        self.run, self.checked = run, False
        self._arguments = Arguments(args)
        self._references = references
        puts = {place.identity for place, _ in run.puts}
        references.look(without=puts)
        self._modules = Modules(run.modules, without=puts)
        forget(run)
        self._leaves = run.leaves()
        self._modes, self._state = state.modes(), state.described(self._leaves)
        self._tensors = Tensors([*run.held(), *self._leaves])
        self._comms = run.recording.comms()
        self._recording = run.recording if run.recording.gpu is None else on_gpu(run.recording)
        self._program = Program(self._recording, run.outputs(), run.gradient_slots(), len(run.state.gradients))
        self._take: Callable[[Sequence[Any], Sequence[torch.Tensor | None]], Sequence[torch.Tensor]]
        self._take = self._program.replay
        self._results = run.results

    def become_graph(self, args: Sequence[Any], pool: Any) -> None:
        """Replay a CUDA graph from now on."""
        given = _blocks(list(flattened(args))), self._given_gradients()
        self._take = Graph(self._program, self._recording, given, self.run.generators, pool).replay

    def change(self, args: Sequence[Any], leaves: Sequence[Any]) -> _Change | None:
        """What has changed, or None."""
        modes = state.modes()
        if modes != self._modes:
            return _Change(next(f"{name} is another" for name, now in modes.items() if now != self._modes[name]), False)
        parts = (self._modules, self._references, self._tensors, self.run.optimizers)
        text = self._arguments.difference(args, leaves)
        text = text or next(filter(None, (part.difference() for part in parts)), "")
        text = text or next((f"{place.name} is not what it was" for place in unfitting(self.run)), "")
        if text:
            return _Change(text, False)
        if state.described(self._leaves) != self._state:
            return _Change("gradients are there that were not, or are not", True)
        return None

    def __call__(self, leaves: Sequence[Any]) -> Any:
        for comm in self._comms:
            agreement.check_usable(comm, "the replay of a step")
        with torch.no_grad(), below_autograd():
            replayed = self._take(_blocks(leaves), self._given_gradients())
        tensors = iter([tensor.detach() for tensor in replayed])
        results = iter([next(tensors) for _ in self._results])
        for leaf, slot in self.run.gradients:
            state.set_gradient(leaf, None if slot is None else next(tensors))
        if self.run.kept or self.run.state.kept:
            gradient_reduction.keep([(leaf, next(tensors), comm) for leaf, _, comm in self.run.kept])
        returned = _with_tensors(self.run.result, results)
        for place, value in self.run.puts:
            place.put(_with_tensors(value, results))
        return returned

    def _given_gradients(self) -> list[torch.Tensor | None]:
        return [*map(state.gradient, self._leaves), *(share for _, share, _ in gradient_reduction.kept())]


def _with_tensors(value: Any, blocks: Iterator[torch.Tensor]) -> Any:
    """``value`` with tensors of ``blocks`` for the Results in it."""
    return mapped(lambda leaf: leaf.wrapped(next(blocks)) if isinstance(leaf, Result) else leaf, value)


def _blocks(leaves: Sequence[Any]) -> list[Any]:
    return [block_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _world(example: Sequence[Any], values: Sequence[Any]) -> Any:
    """The ranks that take the step together, if arguments or what the function refers to tells."""
    distributed = [leaf for leaf in (*flattened(example), *values) if isinstance(leaf, DistTensor)]
    return distributed[0].grid.world if distributed else None


def _largest(run: Run) -> Any:
    """The largest communicator that a run uses."""
    return max(run.recording.comms(), key=lambda comm: comm.size, default=MPI.COMM_SELF)


def capture(
    function: Callable[..., Any], *example: Any, check: bool = True, on_change: str = "raise"
) -> Callable[..., Any]:
    """``function``, recorded once and then replayed: the same numbers, bit for bit, in less time. Collective.

    ``function`` takes a step: forward, loss, ``backward()``, or a part of it. It is run a few times with ``example``,
    and what this rank does is recorded below Python's dispatch: torch's operators on its blocks, messages, sums. What
    is returned does that again when it is called, with arguments like ``example``, which may be in lists, tuples,
    dictionaries and dataclasses, or come by keyword; results may lie in such, too. Afterwards results, gradients
    (added up as ``backward()`` does) and buffers are what the eager step would have left. Recording changes nothing.
    Optimizers and schedulers stay outside.

    Parameters
    ----------
    check
        Whether the first replay is compared with the eager step, bit for bit, on all ranks.
    on_change
        What happens if another shape, parameter, mode or the like comes than was recorded: ``"raise"``, or
        ``"record"`` it, too. Whether gradients are there or None may change.

    Raises
    ------
    CaptureError
        On all ranks, with the line, if something cannot be recorded: values that Python looks at, shapes that follow
        from values, data loaders, attributes and variables that the step counts on, results in other objects.
    UnsupportedOperation
        If ``on_change`` is none of these.
    """
    if on_change not in ON_CHANGE:
        raise UnsupportedOperation(f"capture: on_change={on_change!r} must be one of {', '.join(ON_CHANGE)}")
    return Captured(function, example, check, on_change)
