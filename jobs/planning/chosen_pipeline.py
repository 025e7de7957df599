"""Pipeline plan and simulated timeline of the choice of an exploration.

``distconv explore`` writes the plan, from which training can run, and draws the timeline.
"""

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
"""Simulated mini-batches per stage of an asynchronous schedule, whose mini-batches overlap."""


def split_points(choice: Choice) -> list[str]:
    """Return the submodules that begin the stages, without the first stage."""
    return [stage[0] for stage in choice.stages.stages[1:]]


def pipeline_plan(
    choice: Choice, model: torch.nn.Module, name: str, batch: int, example: torch.Tensor | None = None
) -> PipelinePlan:
    """Return the pipeline plan of a choice. Data parallelism has one stage.

    Parameters
    ----------
    choice : Choice
    model : torch.nn.Module
    name : str
        Name of the model in the plan, as in ``--model``.
    batch : int
        Samples of a mini-batch.
    example : torch.Tensor, optional
        Input of the model for ``distconv.pipeline.split``, which may require one.

    Returns
    -------
    PipelinePlan

    Raises
    ------
    SplitError
        If the model cannot be split at the stage boundaries of the choice.
    """
    cuts = split_points(choice)
    stages = len(cuts) + 1
    return PipelinePlan(
        model=name,
        batch=batch,
        ranks=stages * choice.replicas * choice.width,
        cuts=tuple(cuts),
        replicas=(choice.replicas,) * stages,
        plans=tuple(_plans(choice, model, split(model, cuts, example))),
        schedule=runnable_schedule(choice.schedule),
        microbatches=choice.microbatches,
    )


def runnable_schedule(name: str) -> str:
    """Return the name of the schedule that runs: data parallelism is ``gpipe`` with one stage."""
    return "gpipe" if name == PARALLEL else name


def _plans(choice: Choice, model: torch.nn.Module, stages: list[torch.nn.Module]) -> list[StagePlan]:
    """Return each stage's plan; a stage without convolution or linear layers stays on the previous layer's grid."""
    if choice.plan is None:
        return [None] * len(stages)
    # By the names of layers: a pattern of the full model may match no layer of a stage, which is an error there.
    decided, plans = choice.plan.parts(model), list[StagePlan]()
    last: Mapping[str, int] = {}
    for stage in stages:
        names = dict(stage.named_modules())
        layers = {name: parts for name, parts in decided.items() if name in names}
        last = next(reversed(layers.values()), last)
        plans.append(Plan(layers, choice.width) if layers else dict(last))
    return plans


def timeline(choice: Choice) -> Timeline:
    """Simulate the passes of a mini-batch with predicted costs, or of several mini-batches if asynchronous."""
    name, stages = runnable_schedule(choice.schedule), len(choice.memory)
    endless = FAMILIES[name].weights is not Weights.SYNCHRONOUS
    order = schedule(name, stages, ROUNDS * stages if endless else choice.microbatches)
    costs = choice.costs
    return simulate(
        replace(order, name=choice.schedule),  # the name under which the choice is printed
        costs.forward,
        costs.backward,
        transfer=(*costs.transfer, 0.0),  # nothing follows the last stage
        update=costs.update,
        replicas=choice.replicas,
    )
