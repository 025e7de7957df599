"""Steps of a training: its learning rate, its losses, its end."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.jobs.training import settings as common
from distconv.jobs.training import training


class Line(training.Trainer):
    """One weight that is to be three: y = w x on samples of ones, three steps an epoch."""

    loader: Any = SimpleNamespace(steps=3, samples=6)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return ((outputs - labels) ** 2).mean()


def line(**settings: Any) -> Line:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    made = common.TrainingSettings(
        **{"dtype": "float64", "lr": 0.1, "momentum": 0.5, "warm_up": 0.5, "steps": 4} | settings
    )
    return Line(made, model, dc.ProcessGrid(MPI.COMM_SELF), MPI.COMM_SELF, "cpu")


def test_steps_by_hand() -> None:
    """The gradient of (w - 3)^2 is 2 (w - 3); rates are 0.05, 0.1, 0.1, 0.05: two up, half a cosine down."""
    trainer, x = line(), torch.ones(2, 1, dtype=torch.float64)
    weight, moved = 1.0, 0.0
    for rate in (0.05, 0.1, 0.1, 0.05):
        assert trainer.rate == pytest.approx(rate)
        assert trainer.step(x, 3 * x) == pytest.approx((weight - 3) ** 2)
        moved = 0.5 * moved + 2 * (weight - 3)
        weight -= rate * moved
        assert trainer.model.weight.item() == pytest.approx(weight)
    assert [step for step, _ in trainer.losses] == [1, 2, 3, 4]
    assert (trainer.step_count, trainer.epoch, trainer.rate) == (4, 1, pytest.approx(0))


def test_steps_that_are_given_take_the_place_of_epochs() -> None:
    assert [line(steps=steps, epochs=2).steps for steps in (None, 4, 7)] == [6, 4, 7]


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_an_error(loss: float) -> None:
    with pytest.raises(dc.DistconvError, match=rf"step 5: the loss is {loss}. Use a smaller --lr"):
        line().record_loss(5, loss)


def test_one_weight_that_is_not_finite_is_enough(tmp_path: Path) -> None:
    trainer = line()
    trainer.model.register_parameter("more", torch.nn.Parameter(torch.tensor([1.0, torch.inf, 2.0])))
    with pytest.raises(dc.DistconvError, match="step 0: 'more' is no longer finite, so no checkpoint is written"):
        trainer.save(str(tmp_path))


def test_a_run_goes_on_in_the_middle_of_its_epoch_and_ends_with_its_steps() -> None:
    trainer, asked = line(steps=7), []

    def epoch(number: int, start: int = 0) -> Any:
        asked.append((number, start))
        yield from ((number, step) for step in range(start, 3))

    trainer.loader, trainer.step_count = SimpleNamespace(steps=3, samples=6, epoch=epoch), 4
    taken = []
    for batch in trainer.batches():
        taken.append(batch)
        trainer.step_count += 1
    assert (asked, taken) == ([(1, 1), (2, 0)], [(1, 1), (1, 2), (2, 0)])
