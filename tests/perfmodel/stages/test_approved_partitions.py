"""Partitions of random profiles by each method, as approved, and the predictions of closed forms."""

from __future__ import annotations

import pytest

from distconv.errors import DistconvError
from distconv.perfmodel.stages.closed_forms import SCHEDULES, in_flight, minibatch_time
from distconv.perfmodel.stages.partition import METHODS, partition, stage_time
from tests.jobs.approved import assert_approved
from tests.perfmodel.mixed_networks import digits
from tests.perfmodel.stages.partitions import random_devices, random_profile


@pytest.mark.parametrize("method", METHODS)
def test_partitions(method: str) -> None:
    lines = []
    for seed in range(8):
        profile = random_profile(seed, layers=9)
        for devices in (3, random_devices(seed, layers=9), random_devices(seed, layers=9, memory=2500.0)):
            for bandwidth in (20.0, 400.0):
                title = f"{seed}, {devices if devices == 3 else devices[0].memory}, {bandwidth}"
                try:
                    found = partition(profile, devices, bandwidth, method)
                    slowest = stage_time(profile, found, devices, bandwidth)
                    lines.append(f"{title}: {found.cuts} {found.assignment} {digits(slowest)}: {found}")
                except DistconvError as error:
                    lines.append(f"{title}: {type(error).__name__}: {error}")
    assert_approved(f"perfmodel/partitions/{method}", "\n".join(lines))


def test_closed_forms() -> None:
    forward, backward, transfer = (2.0, 3.5, 1.25, 2.75), (4.5, 1.75, 3.0, 5.25), (0.5, 2.25, 4.125)
    lines = []
    for schedule in SCHEDULES:
        for stages in (1, 2, 3, 4):
            times = [
                minibatch_time(schedule, forward[:stages], backward[:stages], transfer[: stages - 1], count)
                for count in (1, 2, 3, 8)
            ]
            waiting = [in_flight(schedule, stages, count) for count in (1, 3, 8)]
            lines.append(f"{schedule}, {stages} stages: {times} {waiting}")
    assert_approved("perfmodel/closed-forms", "\n".join(lines))
