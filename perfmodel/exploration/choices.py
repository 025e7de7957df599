"""What an exploration looked at, and what came out."""

from __future__ import annotations

from dataclasses import dataclass

from distconv.errors import DistconvError
from distconv.perfmodel.stages.stage_costs import StagePartition
from distconv.plan import Plan


class ExplorationError(DistconvError, ValueError):
    """A question that has no answer: impossible numbers, or no combination fits the memory."""


@dataclass(frozen=True)
class StageCosts:
    """Seconds of a micro-batch forward and backward on each stage, between stages, and of each stage's update.

    Of the first pipeline where there are several; what ``distconv.pipeline.simulate`` takes.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    transfer: tuple[float, ...]
    update: tuple[float, ...]


@dataclass(frozen=True)
class Choice:
    """One combination: ``time`` in seconds of a mini-batch, ``memory`` in bytes on a device of each stage.

    ``microbatches`` are those of the whole mini-batch; each of the ``replicas`` gets its share of them. A stage has
    ``width`` ranks, among which ``plan`` distributes its layers (None: one rank). ``time`` is made of ``costs``.
    ``estimated``: the machine has measured times, but not of all layers of this combination. Its times are those of the
    roofline. Otherwise they rest on measured times, or the machine has none.
    """

    schedule: str
    stages: StagePartition
    microbatches: int
    replicas: int
    time: float
    memory: tuple[float, ...]
    fits: bool
    costs: StageCosts
    width: int = 1
    plan: Plan | None = None
    estimated: bool = False

    def __str__(self) -> str:
        shape = f"{len(self.memory)} stages" if len(self.memory) > 1 else "1 stage"
        shape += f" x {self.replicas} replicas" if self.replicas > 1 else ""
        shape += f" of {self.width} ranks" if self.width > 1 else ""
        size = f"{max(self.memory) / 1e9:.3g} GB" + ("" if self.fits else ": too much")
        size += "  estimate, not measured" if self.estimated else ""
        return f"{self.schedule:<9} {shape:<24} {self.microbatches:>5} micro-batches {self.time:>11.6g} s  {size}"


@dataclass(frozen=True)
class Exploration:
    """The fastest choice that fits, and all that were considered, fastest first and those that do not fit last.

    Estimates are not ranked against choices whose layers were measured: they come after them.

    ``stages`` is its partition, ``time`` in seconds of a mini-batch, ``memory`` in bytes on the fullest device.
    """

    best: Choice
    table: tuple[Choice, ...]
    room: float
    question: str

    @property
    def schedule(self) -> str:
        """``dp`` (data parallelism), or the schedule's name for ``distconv.pipeline.schedule``."""
        return self.best.schedule

    @property
    def stages(self) -> StagePartition:
        """Where the network is cut and which devices have what."""
        return self.best.stages

    @property
    def microbatches(self) -> int:
        """Micro-batches that the mini-batch is divided into."""
        return self.best.microbatches

    @property
    def time(self) -> float:
        """Seconds of a mini-batch."""
        return self.best.time

    @property
    def estimated(self) -> bool:
        """True if the machine has measured times, but not of all layers of the choice. Otherwise they are measured."""
        return self.best.estimated

    @property
    def memory(self) -> float:
        """Bytes on the fullest device."""
        return max(self.best.memory)

    def explain(self) -> str:
        """Why: the choice, the best of each schedule beside it, and what did not fit."""
        fitting = [choice for choice in self.table if choice.fits]
        leaders: dict[str, Choice] = {}
        for choice in fitting:
            shared = choice.replicas > 1 and len(choice.memory) > 1
            leaders.setdefault(f"{choice.schedule} {shared} {choice.width > 1} {choice.estimated}", choice)
        lines = [self.question, f"best: {self.best}", *_cut(self.best)]
        lines += [
            f"{choice}" + (f"  {choice.time / self.time:.2f} x" if choice.estimated == self.estimated else "")
            for choice in leaders.values()
        ]
        lines.append(
            f"{len(self.table)} combinations, {len(self.table) - len(fitting)} of them beyond {self.room / 1e9:.3g} GB"
        )
        estimated = sum(choice.estimated for choice in self.table)
        if estimated:
            compared = "not compared with the others" if not self.estimated else "compared with each other alone"
            lines.append(
                f"{estimated} of them have layers that were not measured on this machine: their times are estimates by "
                f"the roofline, {compared}. Measure all of them with --machine here"
            )
        return "\n".join(lines)


def _cut(choice: Choice) -> list[str]:
    """The layers at which stages begin."""
    if len(choice.memory) == 1:
        return []
    begins = [stage[0] for stage in choice.stages.stages[1:]]
    held = ", ".join(f"{size / 1e9:.3g}" for size in choice.memory)
    return [f"cut before {', '.join(begins)}; GB of each stage: {held}"]
