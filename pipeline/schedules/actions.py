"""Pipeline schedules as data: for each stage the list of its actions, in order.

The simulator, the deadlock check, the memory estimate and the runtime all read the same lists. The version of weights
is the number of updates that made them. Stages, micro-batches, chunks and versions count from 0. A model that is split
for ``stages`` stages with ``chunks`` chunks each has ``stages * chunks`` parts; part ``chunk * stages + stage`` is
chunk number ``chunk`` of a stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from distconv.errors import DistconvError


class ScheduleError(DistconvError, ValueError):
    """A schedule is invalid, or an argument does not fit it."""


class Kind(str, Enum):
    """Kind of an action."""

    F = "F"
    """Forward of one micro-batch through one chunk, with weights ``version``."""
    B = "B"
    """Backward of one micro-batch. In a schedule with W it computes the gradient of the input alone."""
    W = "W"
    """Gradient of the weights, in schedules that separate it from B."""
    SEND = "send"
    """Send the result of ``payload`` to ``peer``. The action starts the message, and the stage does not wait for it."""
    RECEIVE = "receive"
    """Latest position to post the receive. The pass that needs the message waits for it, not this action."""
    UPDATE = "update"
    """Optimizer step, after which the weights are ``version``.

    It is for one mini-batch if ``microbatch`` is set, otherwise for all. Replicas of a stage update together: each
    after its own mini-batch, with the gradients of all of them.
    """
    STASH = "stash"
    """Keep a copy of weights ``version`` until the last gradient of ``microbatch`` is computed."""
    PREDICT = "predict"
    """Extrapolate the newest weights to ``version``, for the action that follows."""
    SWITCH = "switch"
    """Start of another schedule, with an empty pipeline. It occurs in simulated schedules only."""

    def __str__(self) -> str:
        return self.value


COMPUTE = frozenset({Kind.F, Kind.B, Kind.W})


def _kind(value: Kind | str) -> Kind:
    try:
        return Kind(value)
    except ValueError:
        raise ScheduleError(f"kind of action {value!r} is not valid; use one of {', '.join(map(str, Kind))}") from None


class Weights(str, Enum):
    """Weight policy: the versions that the forward and the backward pass of a micro-batch use."""

    SYNCHRONOUS = "synchronous"
    """One version for all micro-batches, and one update at the end."""
    STASH = "stash"
    """Backward uses the version of the forward, which is kept (PipeDream)."""
    PREDICT = "predict"
    """Both passes use a version predicted from the newest weights (SpecTrain)."""
    NEWEST = "newest"
    """Each pass uses the newest weights; there is one copy (stale weights)."""
    RECOMPUTE = "recompute"
    """As NEWEST, but a stage keeps only its input. B repeats the forward pass, so its activations are new, too."""


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a stage's list. Fields that do not apply are None (``chunk``: 0).

    Attributes
    ----------
    kind : Kind
        Kind of action, or its value as a string.
    stage : int
        Stage that performs the action.
    microbatch : int or None
        Micro-batch; in asynchronous schedules the mini-batch.
    chunk : int
        Chunk of the acting stage.
    peer : int or None
        Stage at the other end of a message. Of its replicas, the one that has the micro-batch: number ``microbatch``
        modulo their count.
    version : int or None
        Weights that a pass uses, or that an UPDATE, STASH or PREDICT makes.
    payload : Kind or None
        Content of a message: activation (F) or gradient (B). With several chunks both may go to the same peer. Default:
        an activation if the message goes to a later stage, a gradient if it goes to an earlier one.

    Raises
    ------
    ScheduleError
        If ``kind`` or ``payload`` is invalid.
    """

    kind: Kind
    stage: int
    microbatch: int | None = None
    chunk: int = 0
    peer: int | None = None
    version: int | None = None
    payload: Kind | None = None

    def __post_init__(self) -> None:
        # ``kind`` may still be a string here, which equals its Kind without being it.
        payload = self.payload
        if payload is None and self.peer is not None and self.kind in (Kind.SEND, Kind.RECEIVE):
            payload = Kind.F if (self.peer > self.stage) == (self.kind == Kind.SEND) else Kind.B
        # The class is frozen, so attributes cannot be set in the usual way.
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
    """Input of part ``part`` for a pass over ``microbatch``: an activation (F) or a gradient (B)."""

    payload: Kind
    microbatch: int
    part: int


@dataclass(frozen=True)
class Schedule:
    """Actions of each stage, in order.

    :func:`distconv.pipeline.schedule` makes the known schedules. Any other list can be checked with :func:`validate`.

    Attributes
    ----------
    name : str
    stages : list of list of Action
        One list per stage.
    microbatches : int
        Micro-batches; in asynchronous schedules mini-batches.
    weights : Weights
        Weight policy.
    chunks : int
        Parts of the model on each stage.
    hidden_transfers : bool
        True if results are passed on while they are computed, so that transfers take no time of their own while the
        link keeps up. Otherwise transfers start after the pass. BaPipe calls the former asynchronous execution, which
        is unrelated to :attr:`asynchronous`.
    concurrent : bool
        True if an F and the next B in the list share the stage. Otherwise passes run one after the other.
    replicas : tuple of int
        Ranks of each stage, which take mini-batches round-robin. Empty: one each.
    options : dict
        Options with which the schedule was made.
    """

    name: str
    stages: list[list[Action]]
    microbatches: int
    weights: Weights = Weights.SYNCHRONOUS
    chunks: int = 1
    hidden_transfers: bool = False
    concurrent: bool = False
    replicas: tuple[int, ...] = ()
    # Not compared: remake() and pipelines recognize a known schedule by its actions.
    options: dict[str, Any] = field(default_factory=dict, compare=False)

    def __iter__(self) -> Iterator[Action]:
        return (action for actions in self.stages for action in actions)

    def __str__(self) -> str:
        """Return the passes of each stage in a row.

        Examples
        --------
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

    def replica_actions(self, stage: int, replica: int, replicas: int) -> list[Action]:
        """Return the actions of one of ``replicas`` ranks of a stage, which take micro-batches round-robin.

        Parameters
        ----------
        stage : int
            The stage.
        replica : int
            Index of the rank among the replicas of the stage.
        replicas : int
            Number of replicas.

        Returns
        -------
        list of Action
        """
        return [a for a in self.stages[stage] if a.microbatch is None or a.microbatch % replicas == replica]

    # cached_property stores values in __dict__, so this class cannot have slots.
    @cached_property
    def asynchronous(self) -> bool:
        """True if each mini-batch has its own update. Otherwise there is one for all micro-batches."""
        return any(action.kind is Kind.UPDATE and action.microbatch is not None for action in self)

    @cached_property
    def splits_backward(self) -> bool:
        """True if dL/dw is a separate action, W. Otherwise B computes it."""
        return any(action.kind is Kind.W for action in self)

    def input_of(self, action: Action) -> Message | None:
        """Return the input of an F or B that another pass makes.

        The result is None for an F of the first part, a B of the last part, and other actions.
        """
        if action.kind not in (Kind.F, Kind.B) or action.microbatch is None:
            return None
        part = action.chunk * len(self.stages) + action.stage
        first = 0 if action.kind is Kind.F else len(self.stages) * self.chunks - 1
        return None if part == first else Message(action.kind, action.microbatch, part)

    def received_input_of(self, action: Action) -> Message | None:
        """Return the input of an action as :meth:`input_of`, if it comes as a message.

        The chunks of a single stage exchange their results without messages.
        """
        return None if len(self.stages) == 1 else self.input_of(action)

    def output_of(self, action: Action) -> Message | None:
        """Return the input that an F or B makes for the next or previous part; None where that part does not exist."""
        if action.kind not in (Kind.F, Kind.B) or action.microbatch is None:
            return None
        target = action.chunk * len(self.stages) + action.stage + (1 if action.kind is Kind.F else -1)
        return Message(action.kind, action.microbatch, target) if 0 <= target < len(self.stages) * self.chunks else None

    def message_of(self, action: Action) -> Message | None:
        """Return the message of a send or receive; None for other actions."""
        if action.payload is None:
            return None
        # A message is the output of a pass on the sending stage, and the input of a pass on the receiving one.
        ends = Action(action.payload, action.stage, action.microbatch, action.chunk)
        return self.output_of(ends) if action.kind is Kind.SEND else self.input_of(ends)

    def send_of(self, message: Message) -> Action:
        """Return the action that sends ``message``, on the stage that made it."""
        source = message.part - 1 if message.payload is Kind.F else message.part + 1
        return self._end(Kind.SEND, message, source, message.part)

    def receive_of(self, message: Message) -> Action:
        """Return the action that receives ``message``, on the stage that needs it."""
        source = message.part - 1 if message.payload is Kind.F else message.part + 1
        return self._end(Kind.RECEIVE, message, message.part, source)

    def _end(self, kind: Kind, message: Message, here: int, there: int) -> Action:
        chunk, stage = divmod(here, len(self.stages))
        peer = there % len(self.stages)
        return Action(kind, stage, message.microbatch, chunk, peer, payload=message.payload)
