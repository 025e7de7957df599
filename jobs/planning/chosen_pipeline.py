"""From what an exploration found to what runs: the pipeline plan of a choice, and its simulated timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from distconv.perfmodel.exploration.candidate_stages import PARALLEL
from distconv.perfmodel.exploration.choices import Choice
from distconv.pipeline import FAMILIES, PipelinePlan, Timeline, Weights, schedule, simulate, split
from distconv.pipeline.runtime.placement import StagePlan
from distconv.plan import Plan

ROUNDS = 4
"""Mini-batches that are drawn for each stage, where they follow each other without an end."""


def cuts_of(choice: Choice) -> list[str]:
    """The submodules that begin the stages but the first."""
    return [stage[0] for stage in choice.stages.stages[1:]]


def pipeline_plan(
    choice: Choice, model: torch.nn.Module, name: str, batch: int, example: torch.Tensor | None = None
) -> PipelinePlan:
    """``choice`` for ``model``, called ``name``, as a file has it; data parallelism is one stage.

    ``example``: an input of the model, as ``distconv.pipeline.split`` may need one.

    Raises
    ------
    SplitError
        If the model cannot be cut there.
    """
    cuts = cuts_of(choice)
    stages = len(cuts) + 1
    return PipelinePlan(
        model=name,
        batch=batch,
        ranks=stages * choice.replicas * choice.width,
        cuts=tuple(cuts),
        replicas=(choice.replicas,) * stages,
        plans=tuple(_plans(choice, model, split(model, cuts, example))),
        schedule=runnable(choice.schedule),
        microbatches=choice.microbatches,
    )


def runnable(name: str) -> str:
    """The schedule of ``distconv.pipeline``: with one stage all synchronous ones are the same."""
    return "gpipe" if name == PARALLEL else name


def _plans(choice: Choice, model: torch.nn.Module, stages: list[torch.nn.Module]) -> list[StagePlan]:
    """The plan of each stage's own layers; a stage without any stays on the grid of the layer before."""
    if choice.plan is None:
        return [None] * len(stages)
    decided, plans = choice.plan.parts(model), list[StagePlan]()
    last: Mapping[str, int] = {}
    for stage in stages:
        names = dict(stage.named_modules())
        layers = {name: parts for name, parts in decided.items() if name in names}
        last = next(reversed(layers.values()), last)
        plans.append(Plan(layers, choice.width) if layers else dict(last))
    return plans


def timeline(choice: Choice) -> Timeline:
    """When the passes of a mini-batch run by its predicted costs, of an asynchronous schedule those of several."""
    name, stages = runnable(choice.schedule), len(choice.memory)
    endless = FAMILIES[name].weights is not Weights.SYNCHRONOUS
    order = schedule(name, stages, ROUNDS * stages if endless else choice.microbatches)
    costs = choice.costs
    return simulate(
        replace(order, name=choice.schedule),  # as the choice is printed
        costs.forward,
        costs.backward,
        transfer=(*costs.transfer, 0.0),
        update=costs.update,
        replicas=choice.replicas,
    )
