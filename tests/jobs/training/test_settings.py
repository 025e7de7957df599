"""The learning rate and the optimizers, by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from distconv.jobs.training import settings as common
from distconv.jobs.training.settings import learning_rate, make_optimizer


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    rates = [learning_rate(step, 100, 2.0) for step in range(101)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == max(rates) == 2.0
    assert rates[100] == pytest.approx(0.0)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


def test_the_learning_rate_by_hand() -> None:
    # Two steps up, then half a cosine over eight: after four of them half is left.
    rates = [learning_rate(step, 10, 2.0, 0.2) for step in (0, 1, 2, 4, 6, 8, 10)]
    root = 0.5**0.5
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1 + root, 1.0, 1 - root, 0.0])
    assert learning_rate(0, 10, 2.0, 0.0) == 2.0


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        # SGD: the gradient and decay * weight, the second time with momentum * what was moved before.
        ("sgd", [2 - 0.1 * 1.4, 1.86 - 0.1 * (0.5 * 1.4 + 1 + 0.2 * 1.86)]),
        # Adam moves by the rate in the direction of a gradient that barely changes, whatever its size.
        ("adam", [1.9, 1.8]),
        # AdamW shrinks the weight by rate * decay besides.
        ("adamw", [2 * 0.98 - 0.1, (2 * 0.98 - 0.1) * 0.98 - 0.1]),
    ],
)
def test_two_steps_of_the_optimizers_by_hand(optimizer: str, expected: list[float]) -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    settings = common.TrainingSettings(optimizer=optimizer, lr=0.1, momentum=0.5, weight_decay=0.2)
    taken = make_optimizer(settings, [weight])
    found = []
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        taken.step()
        found.append(weight.item())
    assert found == pytest.approx(expected, abs=1e-4)


def test_decay_is_part_of_the_gradient_of_adam() -> None:
    # With a gradient of -0.2 and decay 0.2 * 2, the weight falls by the rate; without decay it would rise.
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    weight.grad = torch.full_like(weight, -0.2)
    make_optimizer(common.TrainingSettings(optimizer="adam", lr=0.1, weight_decay=0.2), [weight]).step()
    assert weight.item() == pytest.approx(1.9, abs=1e-5)


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
