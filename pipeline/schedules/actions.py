"""A pipeline schedule as data: for each stage the list of actions that it performs, in order.

The simulator, the deadlock check, the memory estimate and the runtime all read the same lists. Stages, micro-batches,
chunks and versions count from 0. A model cut for ``stages`` stages with ``chunks`` chunks each has ``stages * chunks``
parts; part ``chunk * stages + stage`` is a stage's chunk number ``chunk``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from distconv.errors import DistconvError


class ScheduleError(DistconvError, ValueError):
    """A schedule that cannot be, or costs that do not fit it."""


class Kind(str, Enum):
    """What an action does."""

    F = "F"
    """Forward of one micro-batch through one chunk, with weights ``version``."""
    B = "B"
    """Backward; in a schedule with W it computes the gradient of the input alone."""
    W = "W"
    """The gradient of the weights, where it is apart from B."""
    SEND = "send"
    """Pass what ``payload`` made to ``peer``; begins here, and occupies the stage no longer."""
    RECEIVE = "receive"
    """The last moment to post the receive. What needs the message waits for it, not this action."""
    UPDATE = "update"
    """Optimizer step; afterwards the weights are ``version``. Of one mini-batch if it names one, else of all.

    Replicas of a stage do it together: each after its own mini-batch, with the gradients of all of them."""
    STASH = "stash"
    """Keep a copy of weights ``version`` until the last gradient of ``microbatch`` is done."""
    PREDICT = "predict"
    """Extrapolate the newest weights to ``version``, for the action that follows."""
    SWITCH = "switch"
    """Another schedule begins; the pipeline is empty."""

    def __str__(self) -> str:
        return self.value


COMPUTE = frozenset({Kind.F, Kind.B, Kind.W})


def _kind(value: Kind | str) -> Kind:
    try:
        return Kind(value)
    except ValueError:
        raise ScheduleError(f"there is no kind of action {value!r}; there are {', '.join(map(str, Kind))}") from None


class Weights(str, Enum):
    """Which weights the forward and the backward pass of a micro-batch use."""

    SYNCHRONOUS = "synchronous"
    """One version for all micro-batches; one update at the end."""
    STASH = "stash"
    """Backward with the version of the forward, kept since (PipeDream)."""
    PREDICT = "predict"
    """Both passes with a version predicted from the newest (SpecTrain)."""
    NEWEST = "newest"
    """Each pass with the newest weights there are; one copy (stale weights)."""
    RECOMPUTE = "recompute"
    """As NEWEST, but a stage keeps only its input: B runs the forward again, so its activations are new, too."""


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a stage's list. What does not apply is None (``chunk``: 0).

    ``chunk`` is always the acting stage's own. ``peer`` is a stage; of its replicas the one that has the micro-batch,
    number ``microbatch`` modulo their count. ``payload`` says of a send or receive whether it carries an activation
    (F) or a gradient (B): with several chunks both may go to the same peer. Left out, it is an activation on the way
    to a later stage, a gradient on the way to an earlier one. ``kind`` and ``payload`` may be given as text.

    Raises
    ------
    ScheduleError
        If there is no such kind.
    """

    kind: Kind
    stage: int
    microbatch: int | None = None
    chunk: int = 0
    peer: int | None = None
    version: int | None = None
    payload: Kind | None = None

    def __post_init__(self) -> None:
        payload = self.payload
        if payload is None and self.peer is not None and self.kind in (Kind.SEND, Kind.RECEIVE):
            payload = Kind.F if (self.peer > self.stage) == (self.kind == Kind.SEND) else Kind.B
        object.__setattr__(self, "kind", _kind(self.kind))
        object.__setattr__(self, "payload", None if payload is None else _kind(payload))

    def __str__(self) -> str:
        parts = [str(self.kind) if self.payload is None else f"{self.kind} {self.payload}"]
        parts += [] if self.microbatch is None else [f"of micro-batch {self.microbatch}"]
        parts += [f"(chunk {self.chunk})"] if self.chunk else []
        if self.peer is not None:
            parts.append(f"{'to' if self.kind is Kind.SEND else 'from'} stage {self.peer}")
        return f"stage {self.stage}: {' '.join(parts)}"


class Message(NamedTuple):
    """The input of part ``part`` for a pass over ``microbatch``: an activation (F) or a gradient (B)."""

    payload: Kind
    microbatch: int
    part: int


@dataclass(frozen=True)
class Schedule:
    """What each stage does, in order.

    ``hidden_transfers``: results are passed on while they are computed (asynchronous execution), so a transfer
    takes no time of its own as long as the link keeps up. ``concurrent``: an F and the B that comes next in the
    list share the stage. ``replicas``: ranks of each stage, which take mini-batches in turn; none given: one each.
    ``options``: with which it was asked for.
    """

    name: str
    stages: list[list[Action]]
    microbatches: int
    weights: Weights = Weights.SYNCHRONOUS
    chunks: int = 1
    hidden_transfers: bool = False
    concurrent: bool = False
    replicas: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict, compare=False)

    def __iter__(self) -> Iterator[Action]:
        return (action for actions in self.stages for action in actions)

    def __str__(self) -> str:
        """Each stage's passes in a row.

        >>> from distconv.pipeline import schedule
        >>> print(schedule("1f1b-sno", 2, 3))
        1f1b-sno: 2 stages, 3 micro-batches
          stage 0: F0 F1 B0 F2 B1 B2
          stage 1: F0 B0 F1 B1 F2 B2
        """
        rows = [f"{self.name}: {len(self.stages)} stages, {self.microbatches} micro-batches"]
        for stage, actions in enumerate(self.stages):
            row = (f"{a.kind}{a.microbatch}{f'.{a.chunk}' if a.chunk else ''}" for a in actions if a.kind in COMPUTE)
            rows.append(f"  stage {stage}: {' '.join(row)}")
        return "\n".join(rows)

    def of_replica(self, stage: int, replica: int, replicas: int) -> list[Action]:
        """What one of ``replicas`` ranks of a stage does: all that concerns its micro-batches, which come in turn."""
        return [a for a in self.stages[stage] if a.microbatch is None or a.microbatch % replicas == replica]

    @cached_property
    def asynchronous(self) -> bool:
        """True if each mini-batch has an update of its own."""
        return any(action.kind is Kind.UPDATE and action.microbatch is not None for action in self)

    @cached_property
    def splits_backward(self) -> bool:
        """True if dL/dw is an action of its own, W."""
        return any(action.kind is Kind.W for action in self)

    def needs(self, action: Action) -> Message | None:
        """The input of an F or B; None for an F of the first part, a B of the last, and other actions."""
        if action.kind not in (Kind.F, Kind.B) or action.microbatch is None:
            return None
        part = action.chunk * len(self.stages) + action.stage
        first = 0 if action.kind is Kind.F else len(self.stages) * self.chunks - 1
        return None if part == first else Message(action.kind, action.microbatch, part)

    def awaits(self, action: Action) -> Message | None:
        """As :meth:`needs`, if the input comes as a message: one stage hands its chunks' results to itself."""
        return None if len(self.stages) == 1 else self.needs(action)

    def makes(self, action: Action) -> Message | None:
        """The input that an F or B makes for the part after or before; None where that part does not exist."""
        if action.kind not in (Kind.F, Kind.B) or action.microbatch is None:
            return None
        target = action.chunk * len(self.stages) + action.stage + (1 if action.kind is Kind.F else -1)
        return Message(action.kind, action.microbatch, target) if 0 <= target < len(self.stages) * self.chunks else None

    def carries(self, action: Action) -> Message | None:
        """What a send or receive moves; None for other actions."""
        if action.payload is None:
            return None
        ends = Action(action.payload, action.stage, action.microbatch, action.chunk)
        return self.makes(ends) if action.kind is Kind.SEND else self.needs(ends)

    def sends(self, message: Message) -> Action:
        """The action by which ``message`` leaves the stage that made it."""
        source = message.part - 1 if message.payload is Kind.F else message.part + 1
        return self._end(Kind.SEND, message, source, message.part)

    def receives(self, message: Message) -> Action:
        """The action by which the stage that needs ``message`` gets it."""
        source = message.part - 1 if message.payload is Kind.F else message.part + 1
        return self._end(Kind.RECEIVE, message, message.part, source)

    def _end(self, kind: Kind, message: Message, here: int, there: int) -> Action:
        chunk, stage = divmod(here, len(self.stages))
        peer = there % len(self.stages)
        return Action(kind, stage, message.microbatch, chunk, peer, payload=message.payload)
