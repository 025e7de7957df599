"""The searches for cuts and devices against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.perfmodel.stages.dynamic_program import cheapest_stages, fixed_moves
from distconv.perfmodel.stages.partition import Device, PartitionError, partition, stage_time
from tests.perfmodel.stages.partitions import (
    BANDWIDTH,
    every_partition,
    fits,
    random_devices,
    random_profile,
    reference_time,
)


@pytest.mark.parametrize("seed", range(8))
def test_exact_is_as_good_as_brute_force(seed):
    profile, devices = random_profile(seed), random_devices(seed)
    least = min(
        reference_time(profile, cuts, held, devices, BANDWIDTH, "sparsepipe")
        for cuts, held in every_partition(6, devices)
    )
    found = partition(profile, devices, BANDWIDTH, "exact")
    assert found.time == pytest.approx(least, rel=1e-12)
    again = reference_time(profile, found.cuts, found.assignment, devices, BANDWIDTH, "sparsepipe")
    assert again == pytest.approx(found.time, rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("memory", [1200.0, 2500.0])
def test_exact_is_as_good_as_brute_force_within_memory(seed, memory):
    profile, devices = random_profile(seed), random_devices(seed, memory=memory)
    allowed = [each for each in every_partition(6, devices) if fits(profile, *each, devices)]
    if not allowed:
        with pytest.raises(PartitionError, match="fits the memory"):
            partition(profile, devices, BANDWIDTH, "exact")
        return
    least = min(reference_time(profile, *each, devices, BANDWIDTH, "sparsepipe") for each in allowed)
    found = partition(profile, devices, BANDWIDTH, "exact")
    assert found.time == pytest.approx(least, rel=1e-12)
    assert fits(profile, found.cuts, found.assignment, devices)


@pytest.mark.parametrize("seed", range(4))
def test_pipedream_is_as_good_as_brute_force_on_equal_devices(seed):
    profile, devices = random_profile(seed), [Device("device", 4)]
    least = min(reference_time(profile, *each, devices, BANDWIDTH, "pipedream") for each in every_partition(6, devices))
    found = partition(profile, 4, BANDWIDTH, "pipedream")
    assert found.time == pytest.approx(least, rel=1e-12)
    assert stage_time(profile, found, 4, BANDWIDTH, "pipedream") == found.time


@pytest.mark.parametrize("seed", range(8))
def test_sparsepipe_is_the_best_over_its_one_order(seed):
    profile, devices = random_profile(seed), random_devices(seed)
    slowest_first = sorted(devices, key=lambda device: -sum(device.times))
    order = [device.name for device in slowest_first for _ in range(device.count)]

    def in_order(held):
        return [name for stage in held for name in sorted(stage, key=order.index) for _ in range(stage[name])] == order

    allowed = [each for each in every_partition(6, devices) if in_order(each[1])]
    found = partition(profile, devices, BANDWIDTH, "sparsepipe")
    assert found.time == pytest.approx(
        min(reference_time(profile, *each, devices, BANDWIDTH, "sparsepipe") for each in allowed), rel=1e-12
    )
    assert in_order(found.assignment)


def test_no_stage_is_empty_even_where_that_costs_as_little():
    seconds = np.array([5.0, 0.0, 0.0])
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    found = cheapest_stages(
        3, fixed_moves([(1,)] * 3), lambda move: sums[None, :] - sums[:, None], lambda move: np.zeros(4)
    )
    assert [(stage.first, stage.last) for stage in found] == [(0, 1), (1, 2), (2, 3)]


def test_the_slowest_stage_or_boundary_counts_not_their_sum():
    seconds = np.array([3.0, 4.0, 2.0, 2.0])
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    carry = np.array([0.0, 1.0, 9.0, 1.0, 0.0])  # a cut in the middle is dear
    found = cheapest_stages(4, fixed_moves([(1,)] * 2), lambda move: sums[None, :] - sums[:, None], lambda move: carry)
    assert [(stage.first, stage.last) for stage in found] in ([(0, 1), (1, 4)], [(0, 3), (3, 4)])
