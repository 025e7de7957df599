"""Results of an exploration.

:func:`.explore` makes them. Users and the command line read them.
"""

from __future__ import annotations

from dataclasses import dataclass

from distconv.errors import DistconvError
from distconv.perfmodel.stages.stage_costs import StagePartition
from distconv.plan import Plan


class ExplorationError(DistconvError, ValueError):
    """An exploration has no result: invalid arguments, or no combination fits the memory."""


@dataclass(frozen=True)
class StageCosts:
    """Seconds of a micro-batch, as arguments of ``distconv.pipeline.simulate``.

    If there are several replicas of the pipeline, the costs are those of the first replica.

    Attributes
    ----------
    forward, backward : tuple of float
        Passes of each stage.
    transfer : tuple of float
        Messages between each stage and the next.
    update : tuple of float
        Optimizer of each stage, once per mini-batch.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    transfer: tuple[float, ...]
    update: tuple[float, ...]


@dataclass(frozen=True)
class Choice:
    """One combination of schedule, stages and micro-batches, with its time and memory.

    Attributes
    ----------
    schedule : str
        ``"dp"`` (data parallelism: one stage, replicated) or the name of a schedule.
    stages : StagePartition
        Split points and devices.
    microbatches : int
        Micro-batches of the full mini-batch, divided among the replicas.
    replicas : int
        Number of pipelines.
    time : float
        Seconds per mini-batch.
    memory : tuple of float
        Bytes on a device of each stage.
    fits : bool
        True if each stage fits its devices. Otherwise False.
    costs : StageCosts
        Times from which ``time`` is computed.
    width : int
        Ranks of each stage.
    plan : Plan or None
        Distribution of the layers over the ranks of a stage; None for one rank.
    estimated : bool
        True if the machine has measured times, but not of all layers of this combination: its times are those of the
        roofline. Otherwise all are measured, or the machine has no measured times.
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
    """Fastest choice that fits, and all choices that were considered.

    Estimates are not ranked against choices whose layers were measured; they come after them.

    Attributes
    ----------
    best : Choice
        First entry of ``table``.
    table : tuple of Choice
        Fastest first; choices that do not fit last.
    room : float
        Bytes of the smallest device.
    question : str
        Title of the report.
    """

    best: Choice
    table: tuple[Choice, ...]
    room: float
    question: str

    @property
    def schedule(self) -> str:
        """``"dp"`` (data parallelism), or a name for :func:`distconv.pipeline.schedule`."""
        return self.best.schedule

    @property
    def stages(self) -> StagePartition:
        """Split points, and the devices of each stage."""
        return self.best.stages

    @property
    def microbatches(self) -> int:
        """Number of micro-batches of the mini-batch."""
        return self.best.microbatches

    @property
    def time(self) -> float:
        """Seconds per mini-batch."""
        return self.best.time

    @property
    def estimated(self) -> bool:
        """True if the machine has measured times, but not of all layers of the choice.

        Otherwise it has measured times of all layers, or of none.
        """
        return self.best.estimated

    @property
    def memory(self) -> float:
        """Bytes on the device with the most memory."""
        return max(self.best.memory)

    def explain(self) -> str:
        """Return a report: the choice, the best choice of each schedule, and the number of choices that do not fit.

        Returns
        -------
        str
            Several lines; times in seconds, memory in GB.
        """
        # The table is sorted, so the first choice of each kind is its best one.
        fitting = [choice for choice in self.table if choice.fits]
        leaders: dict[str, Choice] = {}
        for choice in fitting:
            shared = choice.replicas > 1 and len(choice.memory) > 1
            leaders.setdefault(f"{choice.schedule} {shared} {choice.width > 1} {choice.estimated}", choice)
        lines = [self.question, f"best: {self.best}", *_format_cuts(self.best)]
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


def _format_cuts(choice: Choice) -> list[str]:
    """Return a line with the layers at which stages begin, and the memory of each stage."""
    if len(choice.memory) == 1:
        return []
    begins = [stage[0] for stage in choice.stages.stages[1:]]
    held = ", ".join(f"{size / 1e9:.3g}" for size in choice.memory)
    return [f"cut before {', '.join(begins)}; GB of each stage: {held}"]
