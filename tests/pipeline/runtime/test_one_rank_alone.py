"""One rank alone passes something else to pipelines: the same error on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distconv.pipeline.runtime.pipeline import Pipeline
from distconv.pipeline.runtime.pipeline_plan import PipelinePlan
from tests.distconv.one_rank_alone import Case, Rank, check, with_weight

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(20)]

USUAL = partial(nn.Linear, 2, 2)


def pipeline(layer: Callable[[], nn.Module] = USUAL, **other: Any) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        stages = [nn.Linear(2, 2) for _ in range(r.size - 1)] + [r.pick(USUAL, layer)()]
        return Pipeline(stages, r.comm, **{"schedule": "gpipe", "loss": F.mse_loss, **r.pick({}, other)})

    return call


def switched(**other: Any) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        given = {"schedule": "gpipe", "microbatches": 2}
        with Pipeline([nn.Linear(2, 2) for _ in range(r.size)], r.comm, "stale", F.mse_loss) as pipe:
            return pipe.switch(**given | r.pick({}, other))

    return call


PIPELINES: dict[str, Case] = {
    "schedule": (pipeline(schedule="1f1b-sno"), "Pipeline's arguments: ranks disagree"),
    "microbatches": (pipeline(microbatches=3), "Pipeline's arguments: ranks disagree"),
    "replicas": (pipeline(replicas=2), "Pipeline's arguments: ranks disagree"),
    "weights": (pipeline(weights="recompute"), "Pipeline's arguments: ranks disagree"),
    "batch norm": (pipeline(batch_norm="deferred"), "Pipeline's arguments: ranks disagree"),
    "plans": (pipeline(plans=[None, None]), "Pipeline's arguments: ranks disagree"),
    "options": (pipeline(delay=1), "Pipeline's arguments: ranks disagree"),
    "stage: class": (pipeline(partial(nn.Bilinear, 2, 2, 2)), "Pipeline's stages: ranks disagree"),
    "stage: no module": (pipeline(lambda: torch.tanh), "Pipeline's stages: ranks disagree"),
    "stage: shape": (pipeline(partial(nn.Linear, 2, 3)), "Pipeline's stages: ranks disagree"),
    "stage: dtype": (pipeline(partial(nn.Linear, 2, 2, dtype=torch.float64)), "Pipeline's stages: ranks disagree"),
    "stage: a weight": (pipeline(lambda: with_weight(len)), "Pipeline: .* differ between ranks"),
    "loss": (pipeline(loss=3), "loss"),
    "optimizer": (pipeline(optimizer=3), "optimizer"),
    "switch: schedule": (switched(schedule="1f1b-sno"), "switch: ranks disagree"),
    "switch: microbatches": (switched(microbatches=3), "switch: ranks disagree"),
    "switch: weights": (switched(weights="recompute"), "switch: ranks disagree"),
    "switch: options": (switched(delay=1), "switch: ranks disagree"),
    "pipeline plan file": (lambda r: PipelinePlan.load(r.pick("a", "b"), r.comm), r"\(on rank"),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(rank: Rank, name: str) -> None:
    check(rank, *PIPELINES[name])
