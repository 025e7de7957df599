"""Costs of stages: each formula by hand."""

from __future__ import annotations

import itertools

import pytest

from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from distconv.perfmodel.stages.partition import stage_time
from distconv.perfmodel.stages.stage_costs import COSTS, PrefixSums, StagePartition
from tests.perfmodel.stages.partitions import BANDWIDTH, every_partition, random_devices, random_profile, reference_time


def two_stages(first, second):
    return StagePartition("by hand", (1,), (1.0,), (("a",), ("b",)), ({"device": first}, {"device": second}), 0.0)


def test_stage_time_is_eq_4_and_eq_5():
    profile = Profile([Layer("a", 1.0, 2.0, 200.0, 100.0), Layer("b", 0.5, 0.5, 8.0, 4.0)])
    # Stage a: (3 + 2 (3 - 1) 100 / 50) / 3; boundary 200 / 50.
    assert stage_time(profile, two_stages(3, 1), 4, 50.0) == 4.0
    assert stage_time(profile, two_stages(3, 1), 4, 500.0) == pytest.approx((3 + 0.8) / 3, rel=1e-14)


def test_pipedreams_cost_divides_synchronisation_and_boundaries_by_the_replicas():
    profile = Profile([Layer("a", 1.0, 2.0, 200.0, 100.0), Layer("b", 0.5, 0.5, 8.0, 4.0)])
    assert stage_time(profile, two_stages(2, 2), 4, 50.0, "pipedream") == 4.0
    found = stage_time(profile, two_stages(3, 1), 4, 400.0, "pipedream")
    assert found == pytest.approx((3 + 4 * 2 * 100 / (3 * 400)) / 3, rel=1e-14)


def test_memory_grows_with_the_mini_batches_in_flight():
    profile = Profile([Layer("a", 1.0, 1.0, 100.0, 10.0), Layer("b", 1.0, 1.0, 1000.0, 1.0)])
    stash, keep = (PrefixSums(profile, 5, 1.0, COSTS[name]) for name in ("pipedream", "bapipe"))
    # Two replicas in front of three devices: ceil(5 / 2) in flight.
    assert stash.stage_bytes(0, 1, (2,), 5) == 3 * (100 + 10) + 10
    assert keep.stage_bytes(0, 1, (2,), 5) == 3 * 100 + 2 * 10
    assert keep.stage_bytes(1, 2, (1,), 1) == 1000 + 2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cost", ["pipedream", "sparsepipe"])
def test_stage_time_of_any_partition_is_the_sum_by_hand(seed, cost):
    profile, devices = random_profile(seed), random_devices(seed)
    sample = list(itertools.islice(every_partition(6, devices), 0, None, 7))
    assert sample
    for cuts, held in sample:
        found = StagePartition("", tuple(cuts), tuple(cuts), (("",) * 6,), tuple(held), 0.0)
        expected = reference_time(profile, cuts, held, devices, BANDWIDTH, cost)
        assert stage_time(profile, found, devices, BANDWIDTH, cost) == pytest.approx(expected, rel=1e-12)
