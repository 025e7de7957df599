"""Training of every reference model over a grid, against plain torch in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import distconv as dc
from distconv.jobs.planning.options import run_on_rank_0
from distconv.jobs.training.training import TrainingSettings
from distconv.jobs.verification import exactness
from distconv.layers.models import MODELS

LOSS_LIMIT, WEIGHT_LIMIT, BUFFER_LIMIT = 1e-10, 1e-9, 1e-10
STEPS, BATCH = 3, 3


@dataclass(frozen=True)
class Case:
    """A model of full depth with few channels, on samples whose sizes do not divide evenly.

    A small learning rate keeps round-off from growing where batch norm has a few values per channel.
    """

    model: str
    size: tuple[int, ...]
    width: int
    classes: int = 5
    lr: float = 1e-2
    in_channels: int = 3

    def settings(self) -> TrainingSettings:
        """Three steps of SGD with momentum."""
        return TrainingSettings(
            self.model, self.width, batch=BATCH, steps=STEPS, optimizer="sgd", lr=self.lr, dtype="float64", seed=4
        )

    def samples(self) -> exactness.RandomSamples:
        """Normal numbers."""
        return exactness.RandomSamples((self.in_channels, *self.size), self.classes, MODELS[self.model].predicts)


CASES = [
    Case("lenet5", (29, 33), 3),
    Case("alexnet", (35, 33), 4),
    Case("vgg11_bn", (33, 37), 2),
    Case("resnet20", (17, 15), 2),
    Case("resnet50", (67, 53), 2, lr=1e-4),
    Case("cosmoflow", (17, 9, 19), 2),
    Case("mesh1k", (67, 43), 3, classes=1, lr=1e-3),
    Case("unet", (21, 18), 2, classes=1),
    Case("unet3d", (9, 11, 17), 2, classes=3),
]


FLAT = {3: ["h=3"], 4: ["h=2,w=2", "n=2,c=2"]}
DEEP = {3: ["h=3"], 4: ["d=2,w=2", "n=2,c=2"]}
"""For images, and for volumes."""


def check(comm: Any, case: Case) -> None:
    """Compare every loss, weight and buffer."""
    expected = run_on_rank_0(comm, lambda: exactness.train_at_random(case.settings(), case.samples(), None))
    for text in (DEEP if len(case.size) == 3 else FLAT)[comm.size]:
        grid = dc.ProcessGrid(comm, **dc.parse_grid(text))
        found = exactness.train_at_random(case.settings(), case.samples(), grid)
        assert exactness.difference(found, expected).loss <= LOSS_LIMIT, (text, found.losses, expected.losses)
        for name, tensor in expected.weights.items():
            limit = BUFFER_LIMIT if "running" in name else WEIGHT_LIMIT
            assert exactness.relative(found.weights[name], tensor) <= limit, (text, name)


@pytest.mark.long
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_training_a_reference_model_equals_one_process(comm: Any, case: Case) -> None:
    check(comm, case)
