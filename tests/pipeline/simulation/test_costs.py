"""Costs of a simulation: how they are shared out, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.pipeline import ScheduleError, schedule, simulate


def test_a_schedule_that_has_w_spends_half_of_backward_on_it_unless_told():
    found = schedule("zero-bubble", 3, 5)
    assert simulate(found, 1, 3).makespan == simulate(found, 1, 1.5, 1.5).makespan


def test_a_schedule_without_w_does_it_in_its_backward():
    found = schedule("gpipe", 3, 5)
    assert simulate(found, 1, 2, 1).makespan == simulate(found, 1, 3).makespan


def test_activation_and_transfer_may_differ_from_stage_to_stage():
    timeline = simulate(schedule("1f1b-sno", 3, 6), 1, 2, transfer=[1, 10, 0], activation=np.array([10, 20, 40]))
    assert timeline.peak_activations == [30, 40, 40]
    assert simulate(schedule("1f1b-sno", 3, 1), 1, 2, transfer=[1, 10, 0]).makespan == 9 + 2 * 11


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": [1, 2]}, "forward: 2 costs for 3 stages; give one number or 3"),
        ({"forward": -1}, "forward of stage 0 is -1.0; costs are finite and not below zero"),
        ({"backward": [1, float("nan"), 1]}, "backward of stage 1 is nan"),
        ({"weight": float("inf")}, "weight of stage 0 is inf"),
        ({"transfer": "fast"}, "transfer='fast' is neither a number nor one number per stage"),
        ({"update": [None] * 3}, "is neither a number nor"),
        ({"activation": [1] * 4}, "activation: 4 costs for 3 stages"),
        ({"replicas": 0}, "replicas of stage 0=0 is not a whole number"),
        ({"replicas": [1, 1]}, "2 counts of replicas for 3 stages"),
    ],
)
def test_costs_that_do_not_fit_are_refused_in_a_line(costs, message):
    with pytest.raises(ScheduleError) as error:
        simulate(schedule("gpipe", 3, 2), **{"forward": 1, "backward": 2, **costs})
    assert message in str(error.value) and "\n" not in str(error.value)
