"""The learning rate and the optimizers, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distconv.jobs.training import settings as common
from distconv.jobs.training.settings import learning_rate, make_optimizer


def test_the_learning_rate_by_hand() -> None:
    # Two steps up, then half a cosine over eight: after four of them half is left.
    rates = [learning_rate(step, 10, 2.0, 0.2) for step in (0, 1, 2, 4, 6, 8, 10)]
    root = 0.5**0.5
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1 + root, 1.0, 1 - root, 0.0])
    assert learning_rate(0, 10, 2.0, 0.0) == 2.0
    # A tenth rises by default.
    assert [learning_rate(step, 100, 2.0) for step in (0, 9, 10, 55, 100)] == pytest.approx([0.2, 2.0, 2.0, 1.0, 0.0])


@pytest.mark.parametrize("drop_last", [False, True])
def test_training_samples_are_shuffled_and_whole_batches_if_asked_for(drop_last: bool) -> None:
    settings = common.TrainingSettings(dtype="float64", drop_last=drop_last)
    read = {"dtype": torch.float64, "device": "cpu"}
    assert settings.evaluation_options("cpu") == read
    assert settings.loader_options("cpu") == {**read, "shuffle": True, "drop_last": drop_last}


@pytest.mark.parametrize(
    ("given", "kind", "expected"),
    [
        ({"optimizer": "sgd"}, torch.optim.SGD, {"lr": 0.3, "momentum": 0.4, "weight_decay": 0.2}),
        ({"optimizer": "adam"}, torch.optim.Adam, {"lr": 0.3, "betas": (0.9, 0.999), "weight_decay": 0.2}),
        ({"optimizer": "adamw"}, torch.optim.AdamW, {"lr": 0.3, "betas": (0.9, 0.999), "weight_decay": 0.2}),
        ({"optimizer": "RMSprop"}, torch.optim.RMSprop, {"lr": 0.3, "momentum": 0, "weight_decay": 0}),
        (
            {"optimizer": "adamw", "optimizer_args": {"lr": 0.7, "eps": 0.5}},
            torch.optim.AdamW,
            {"lr": 0.7, "eps": 0.5, "weight_decay": 0.2},
        ),
    ],
)
def test_an_optimizer_has_the_numbers_of_the_settings(given: dict[str, Any], kind: type, expected: Any) -> None:
    settings = common.TrainingSettings(lr=0.3, momentum=0.4, weight_decay=0.2, **given)
    made = make_optimizer(settings, [torch.nn.Parameter(torch.zeros(1))])
    assert type(made) is kind
    assert {name: made.param_groups[0][name] for name in expected} == expected
