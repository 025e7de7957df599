"""BaPipe's balanced partition, step by step."""

from __future__ import annotations

import itertools
import random

import pytest

from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from distconv.perfmodel.stages.bapipe import DeviceChain, _neighbours
from distconv.perfmodel.stages.memory import excess_bytes
from distconv.perfmodel.stages.partition import Device, PartitionError, partition
from distconv.perfmodel.stages.stage_costs import COSTS, PrefixSums

FAST = 1e12


def chain_of(seconds, activations=None, parameters=1.0):
    activations = activations or [1.0] * len(seconds)
    return Profile(
        [
            Layer(f"n{index}", 0.0, time, size, parameters)
            for index, (time, size) in enumerate(zip(seconds, activations, strict=True))
        ]
    )


def test_the_ideal_time_is_eq_1():
    profile = chain_of([1.0] * 6)
    devices = [Device("A", 1, [1.0] * 6), Device("B", 2, [0.5] * 6)]
    assert DeviceChain(PrefixSums(profile, devices, FAST, COSTS["bapipe"])).ideal_time() == pytest.approx(
        1 / (1 / 6 + 2 / 3)
    )


def test_equal_layers_on_unlike_devices_are_shared_out_by_speed():
    devices = [Device("slow", 1, [2.0] * 9), Device("fast", 1, [1.0] * 9)]
    found = partition(chain_of([1.0] * 9), devices, FAST, "bapipe")
    assert found.cuts == (3,) and found.positions == (3.0,)
    assert found.assignment == ({"slow": 1}, {"fast": 1})
    assert found.time == 6.0


def test_cuts_move_until_the_stages_are_balanced():
    chain = DeviceChain(PrefixSums(chain_of([1.0] * 10), 4, FAST, COSTS["bapipe"]))
    start = chain.start_cuts(range(1, 10))
    assert chain.stage_times(start) == [2.0, 2.0, 2.0, 4.0]
    assert chain.time(start) == chain.slowest_stage(start) == 4.0
    assert sorted(chain.stage_times(chain.improve(start, range(1, 10)))) == [2.0, 2.0, 3.0, 3.0]


def test_a_shared_layer_sends_its_input_and_the_part_of_its_output():
    terms = PrefixSums(chain_of([1.0] * 3, [8.0, 4.0, 1.0]), 2, 1.0, COSTS["bapipe"])
    assert terms.boundary_time(1.0, 1) == 8.0
    assert terms.boundary_time(1.25, 1) == 8.0 + 0.25 * 4.0


def test_positions_that_move_whole_layers_move_the_cuts_with_them_and_leave_no_stage_empty():
    moved = 0
    for seed in range(300):
        draw = random.Random(seed)
        times = [draw.choice([0.1, 1.0, draw.uniform(0, 8)]) for _ in range(draw.randint(4, 8))]
        count = draw.randint(2, 4)
        found = partition(chain_of(times), count, FAST, "bapipe")
        whole = DeviceChain(PrefixSums(chain_of(times), count, FAST, COSTS["bapipe"])).time(found.cuts)
        assert all(found.stages) and found.time <= whole
        edges = [0.0, *found.positions, float(len(times))]
        assert all(a < b for a, b in itertools.pairwise(edges))
        for cut, at in zip(found.cuts, found.positions, strict=True):
            assert at == cut if at == int(at) else abs(at - cut) < 1
        moved += found.positions != found.cuts
    assert moved > 100


def test_whole_layers_fit_the_memory_too_where_a_layer_is_shared():
    profile = chain_of([1.0] * 3, [1.0, 10.0, 5.0], parameters=0.0)
    roomy = partition(profile, 2, FAST, "bapipe")
    assert roomy.cuts == (1,) and roomy.positions == pytest.approx((1.5,))
    # Shared, the first stage holds 2 (1 + 5) bytes and the second 5 + 5; whole, the second holds 15.
    with pytest.raises(PartitionError, match="the smallest memory that works is 15 bytes"):
        partition(profile, [Device("gpu", 2, memory=14.0)], FAST, "bapipe")
    tight = [Device("gpu", 2, memory=15.0)]
    found = partition(profile, tight, FAST, "bapipe")
    terms = PrefixSums(profile, tight, FAST, COSTS["bapipe"])
    assert (
        excess_bytes(terms, DeviceChain(terms).stages(found.cuts))
        == excess_bytes(terms, DeviceChain(terms).stages(found.positions))
        == 0
    )


def test_where_a_boundary_is_the_slowest_only_small_ones_are_cut():
    activations = [100.0, 100.0, 1.0, 100.0, 100.0, 100.0, 2.0, 100.0, 100.0]
    profile = chain_of([1.0] * 9, activations)
    chain = DeviceChain(PrefixSums(profile, 3, 1.0, COSTS["bapipe"]))
    assert chain.coarse_cuts() == [3, 7]
    found = partition(profile, 3, 1.0, "bapipe")
    assert found.cuts == (3, 7)
    assert found.time == 4.0


def test_the_smallest_boundaries_are_kept_where_too_few_are_small():
    chain = DeviceChain(PrefixSums(chain_of([1.0] * 5, [50.0, 40.0, 30.0, 20.0, 1.0]), 4, 1.0, COSTS["bapipe"]))
    assert chain.coarse_cuts() == [2, 3, 4]


def test_more_devices_than_layers_are_refused():
    with pytest.raises(PartitionError, match=r"4 devices.*only 3 layers; use at most 3 devices"):
        partition(chain_of([1.0] * 3), 4, FAST, "bapipe")


def test_neighbours_are_one_cut_one_place_away_either_way():
    assert _neighbours([2, 4], [1, 2, 3, 4, 5]) == [[1, 4], [3, 4], [2, 3], [2, 5]]
    assert _neighbours([2, 3], [2, 3, 7]) == [[2, 7]]
