"""Optimizers and schedulers are torch's: numbers of each step, also of a run that goes on in the middle."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from distconv.errors import DistconvError
from distconv.jobs.configuration.optimisation import RateSchedule, make_torch_optimizer, optimizer_name, scheduler_name


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return make_torch_optimizer("adamw", parameters, lr=0.02)


@pytest.mark.parametrize(
    ("name", "arguments", "full"),
    [
        ("OneCycleLR", {}, {"max_lr": 0.02, "total_steps": 9}),
        ("OneCycleLR", {"max_lr": 0.1, "epochs": 3, "steps_per_epoch": 4}, {"max_lr": 0.1, "total_steps": 12}),
        ("CosineAnnealingLR", {"eta_min": 0.001}, {"T_max": 9, "eta_min": 0.001}),
        ("StepLR", {"step_size": 2}, {"step_size": 2}),
    ],
)
def test_each_step_has_the_numbers_of_torch(name: str, arguments: dict[str, Any], full: dict[str, Any]) -> None:
    optimizer = adamw([torch.nn.Parameter(torch.ones(2))])
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **full)
    expected = []
    for _ in range(9):
        expected.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
        optimizer.step()
        scheduler.step()
    schedule = RateSchedule(adamw).begin(name, arguments, steps=9, peak=0.02)
    for step in (*range(9), 4, 1, 8):
        found = schedule.values_at(step)
        assert (found["lr"], found["betas"]) == expected[step]
    assert len({rate for rate, _ in expected}) > 3


def test_all_scheduled_values_of_a_group_are_given_and_no_others() -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return make_torch_optimizer("sgd", parameters, lr=0.02, momentum=0.5, weight_decay=0.125)

    schedule = RateSchedule(sgd).begin("StepLR", {"step_size": 1, "gamma": 0.5}, steps=9, peak=3.0)
    assert schedule.values_at(2) == {"lr": 0.005, "momentum": 0.5, "weight_decay": 0.125}
    assert set(RateSchedule(adamw).begin("StepLR", {"step_size": 1}, steps=9, peak=3.0).values_at(0)) == {
        "lr",
        "betas",
        "weight_decay",
    }
    assert schedule.values_at(0)["lr"] == 0.02
    assert scheduler_name("") == ""


def test_classes_of_torch_are_known_and_others_refused() -> None:
    assert [optimizer_name(name) for name in ("sgd", "adamw", "RMSprop")] == ["sgd", "adamw", "RMSprop"]
    assert scheduler_name("OneCycleLR") == "OneCycleLR"
    for name in ("Optimizer", "LBFGS", "lr_scheduler", "none"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not sgd, adam, adamw or another class"):
            optimizer_name(name)
    for name in ("ReduceLROnPlateau", "LRScheduler", "none"):
        with pytest.raises(argparse.ArgumentTypeError, match="that is stepped without arguments"):
            scheduler_name(name)


def test_arguments_that_they_do_not_take_are_one_line() -> None:
    with pytest.raises(DistconvError, match=r"--optimizer sgd: .*'speed'"):
        make_torch_optimizer("sgd", [torch.nn.Parameter(torch.ones(1))], lr=1.0, speed=3)
    with pytest.raises(DistconvError, match=r"--scheduler StepLR: .*step_size"):
        RateSchedule(adamw).begin("StepLR", {}, steps=3, peak=1.0)
