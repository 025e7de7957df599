"""Stage partitioning: costs by hand, the searches against brute force and an independent one, what is refused."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from distconv.jobs.papers.sparsepipe import command
from distconv.jobs.papers.sparsepipe import setting as published
from distconv.perfmodel.profiles.layer_profile import Profile
from distconv.perfmodel.stages.partition import METHODS, Device, PartitionError, partition, stage_time
from tests.perfmodel.stages.partitions import BANDWIDTH, random_devices, random_profile

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "profiles"


# -- the searches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("method", [method for method in METHODS if method != "exact"])
def test_no_method_is_better_than_exact(seed, method):
    profile = random_profile(seed, layers=12)
    devices = random_devices(seed, layers=12)
    for bandwidth in (5.0, 50.0, 5000.0):
        best = stage_time(profile, partition(profile, devices, bandwidth, "exact"), devices, bandwidth)
        assert stage_time(profile, partition(profile, devices, bandwidth, method), devices, bandwidth) >= best


@pytest.mark.parametrize("method", METHODS)
def test_a_partition_holds_each_layer_once_and_all_devices(method):
    profile, devices = random_profile(5, layers=9), random_devices(5, layers=9)
    found = partition(profile, devices, BANDWIDTH, method)
    assert [name for stage in found.stages for name in stage] == [layer.name for layer in profile.layers]
    assert len(found.stages) == len(found.assignment) == len(found.cuts) + 1
    assert found.replicas == tuple(sum(held.values()) for held in found.assignment)
    for device in devices:
        assert sum(held.get(device.name, 0) for held in found.assignment) == device.count


# -- published profiles and settings ----------------------------------------------------------------------------------


def over_antichains(profile, count, bandwidth):
    """PipeDream's optimum over *all* sets of layers that are closed under what they read, not over one order."""
    layers = profile.layers
    place = {layer.name: index for index, layer in enumerate(layers)}
    reads, readers = [0] * len(layers), [0] * len(layers)
    for producer, consumer in profile.edges:
        reads[place[consumer]] |= 1 << place[producer]
        readers[place[producer]] |= 1 << place[consumer]
    states, waiting = {0}, [0]
    while waiting:
        state = waiting.pop()
        for index, needed in enumerate(reads):
            if not state >> index & 1 and not needed & ~state and (larger := state | 1 << index) not in states:
                states.add(larger)
                waiting.append(larger)
    ordered = sorted(states, key=lambda state: (state.bit_count(), state))
    member = np.array([[state >> index & 1 for index in range(len(layers))] for state in ordered], dtype=float)
    seconds = member @ [layer.time_s for layer in layers]
    parameters = member @ [layer.parameter_bytes for layer in layers]
    carried = np.array(
        [
            sum(layer.activation_bytes for i, layer in enumerate(layers) if state >> i & 1 and readers[i] & ~state)
            for state in ordered
        ]
    )
    inside = (member @ (1 - member).T == 0) & ~np.eye(len(ordered), dtype=bool)
    best = np.full((count + 1, len(ordered)), np.inf)
    best[0, 0] = 0.0
    for used, m in [(total, last) for total in range(1, count + 1) for last in range(1, total + 1)]:
        sent = 4 * (m - 1) / (m * bandwidth) * (parameters[None] - parameters[:, None])
        stage = (seconds[None] - seconds[:, None] + sent) / m
        before = np.maximum(best[used - m], 2 * carried / (bandwidth * m))
        reached = np.where(inside, np.maximum(before[:, None], stage), np.inf).min(axis=0)
        best[used] = np.minimum(best[used], reached)
    return best[count, -1]


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
@pytest.mark.parametrize("name", ["alexnet", "vgg16", "squeezenet1_0", "densenet121"])
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("bandwidth", [1e8, 1e9, 1e10])
def test_one_linear_order_is_as_good_as_all_antichains_on_four_published_profiles(name, count, bandwidth):
    profile = Profile.load(DATA / f"{name}.txt")
    best = over_antichains(profile, count, bandwidth)
    assert partition(profile, count, bandwidth).time == pytest.approx(best, rel=1e-12)


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("bandwidth", [1e8, 1e9, 1e10])
def test_other_orders_are_up_to_3_percent_faster_on_resnet50(count, bandwidth):
    profile = Profile.load(DATA / "resnet50.txt")
    best = over_antichains(profile, count, bandwidth)
    faster = {(2, 1e9): 0.0294, (8, 1e10): 0.0118}.get((count, bandwidth), 0.0)
    assert 1 - best / partition(profile, count, bandwidth).time == pytest.approx(faster, abs=1e-4)


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_another_order_is_more_than_10_percent_faster_on_inception_v3():
    profile = Profile.load(DATA / "inception_v3.txt")
    draw = random.Random(0)
    orders = [Profile(draw.sample(profile.layers, len(profile.layers)), profile.edges) for _ in range(20)]
    best = min(partition(order, 4, 1e9).time for order in orders)
    assert best < 0.9 * partition(profile, 4, 1e9).time


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
@pytest.mark.parametrize("count", [4, 8])
def test_no_method_is_better_than_exact_on_published_profiles(count):
    paths = sorted(DATA.glob("*.txt"))
    assert len(paths) == 6
    for path in paths:
        profile = Profile.load(path)
        costs = {m: stage_time(profile, partition(profile, count, 1e9, m), count, 1e9) for m in METHODS}
        assert costs["exact"] == min(costs.values()), (path.stem, costs)


def test_eight_gpus_over_gigabit_ethernet_split_the_dense_network_as_table_iii_splits_the_sparse_one():
    row = published.TABLE_III[-1]
    devices = published.by_roofline(False).devices(row.counts)
    found = partition(published.vgg16_bn("TitanXP", sparse=False), devices, 1e9 / 8, "sparsepipe")
    assert found.assignment == row.assignment
    assert found.cuts == (24,)


def test_vgg16_bn_has_the_papers_53_layers_and_the_first_block_computes_most():
    profile = published.vgg16_bn("TitanXP", sparse=False)
    assert len(profile.layers) == 53
    assert sum(layer.time_s for layer in profile.layers[:24]) > 0.5 * sum(layer.time_s for layer in profile.layers)
    assert sum(layer.parameter_bytes for layer in profile.layers[24:]) > 200e6


@pytest.mark.parametrize("row", published.TABLE_III, ids=lambda row: str(sum(row.counts.values())))
def test_no_published_split_beats_exact_and_the_same_split_costs_the_same(row):
    profile, devices = published.vgg16_bn("TitanXP", sparse=False), published.by_roofline(False).devices(row.counts)
    theirs = command.as_published(profile, row, devices, 1e9 / 8)
    found = partition(profile, devices, 1e9 / 8, "exact")
    assert theirs >= found.time
    if found.assignment == row.assignment:
        assert theirs == found.time


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_where_no_memory_is_enough_the_smallest_that_works_is_named_and_works(method):
    profile = random_profile(7)

    def tried(memory):
        return partition(profile, [Device("gpu", 3, memory=memory)], BANDWIDTH, method)

    with pytest.raises(PartitionError, match="the smallest memory that works is") as raised:
        tried(1.0)
    message = str(raised.value)
    assert "\n" not in message and "'gpu', which has 1" in message and "layers 'n" in message
    enough = int(message.split("works is ")[1].split()[0])
    assert tried(float(enough)).time >= tried(None).time
    with pytest.raises(PartitionError):
        tried(enough - 1.0)


@pytest.mark.parametrize("seed", range(6))
def test_the_factor_that_is_named_for_the_other_devices_is_enough(seed):
    profile, sizes = random_profile(seed), {"A": 1.0, "B": 3.7}

    def tried(sizes):
        return partition(profile, [Device(name, 2, memory=size) for name, size in sizes.items()], BANDWIDTH, "exact")

    with pytest.raises(PartitionError, match="times theirs") as raised:
        tried(sizes)
    message = str(raised.value)
    named, enough = message.split("on device '")[1][0], float(message.split("works is ")[1].split()[0])
    factor = float(message.split("the others ")[1].split()[0])
    assert tried({name: enough if name == named else factor * size for name, size in sizes.items()}).time > 0


def test_unknown_methods_costs_and_foreign_partitions_are_refused():
    profile = random_profile(0)
    for method in ("best", ["best"]):
        with pytest.raises(PartitionError, match=r"method=.*'best'.* is not valid\. Use one of pipedream, "):
            partition(profile, 2, 1e9, method)
    found = partition(profile, 2, 1e9)
    for wrong in (None, "net.txt", profile.layers):
        with pytest.raises(PartitionError, match=r"partition: found .*, expected a Profile"):
            partition(wrong, 2, 1e9)
        with pytest.raises(PartitionError, match=r"stage_time: found .*, expected a Profile"):
            stage_time(wrong, found, 2, 1e9)
        with pytest.raises(PartitionError, match=r"stage_time: found .*, expected what partition\(\) returns"):
            stage_time(profile, wrong, 2, 1e9)
    with pytest.raises(PartitionError, match=r"cost='best' is not valid\. Use one of pipedream, "):
        stage_time(profile, found, 2, 1e9, "best")
    with pytest.raises(PartitionError, match=r"6 layers.*the profile has 7 layers"):
        stage_time(random_profile(0, layers=7), found, 2, 1e9)
    with pytest.raises(PartitionError, match=r"the devices are \['gpu'\]"):
        stage_time(profile, found, [Device("gpu", 2)], 1e9)
    with pytest.raises(PartitionError, match="has 2 devices 'device', but there are 1"):
        stage_time(profile, found, 1, 1e9)
