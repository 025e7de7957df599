"""Stage partitioning: costs by hand, the searches against brute force and an independent one, what is refused."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest

import distconv as dc
from distconv.jobs.papers.sparsepipe import command
from distconv.jobs.papers.sparsepipe import setting as published
from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from distconv.perfmodel.stages.partition import METHODS, Device, PartitionError, partition, stage_time
from distconv.perfmodel.stages.stage_costs import COSTS, StagePartition, Terms

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "profiles"
BANDWIDTH = 50.0


def random_profile(seed, layers=6):
    """Layers with random costs, most of them in a chain, some skipped."""
    draw = random.Random(seed)
    names = [f"n{index}" for index in range(layers)]
    made = [
        Layer(name, draw.uniform(0, 4), draw.uniform(0, 8), draw.randint(0, 400), draw.choice([0, 30, 300]))
        for name in names
    ]
    skips = [(a, b) for a, b in itertools.combinations(names, 2) if draw.random() < 0.15]
    return Profile(made, sorted({*itertools.pairwise(names), *skips}))


def random_devices(seed, layers=6, memory=None):
    draw = random.Random(-1 - seed)
    return [Device(name, draw.randint(1, 2), [draw.uniform(0.5, 12) for _ in range(layers)], memory) for name in "AB"]


def every_partition(layers, devices):
    """All cuts with all ways to give all devices to the stages."""
    for stages in range(1, sum(device.count for device in devices) + 1):
        for cuts in itertools.combinations(range(1, layers), stages - 1):
            for held in shares([device.count for device in devices], stages):
                if all(map(sum, held)):
                    yield (
                        list(cuts),
                        [{device.name: n for device, n in zip(devices, counts, strict=True) if n} for counts in held],
                    )


def shares(counts, stages):
    if stages == 1:
        yield [tuple(counts)]
        return
    for first in itertools.product(*(range(count + 1) for count in counts)):
        for rest in shares([count - taken for count, taken in zip(counts, first, strict=True)], stages - 1):
            yield [first, *rest]


def by_hand(profile, cuts, assignment, devices, bandwidth, cost):
    """The slowest stage or boundary, summed layer by layer."""
    kinds = {device.name: device for device in devices}
    edges = [0, *cuts, len(profile.layers)]
    worst = 0.0
    for (first, last), held in zip(itertools.pairwise(edges), assignment, strict=True):
        inside, before = profile.layers[first:last], {layer.name for layer in profile.layers[:first]}
        m = sum(held.values())
        slowest = max(
            sum((kinds[name].times or [layer.time_s for layer in profile.layers])[first:last]) for name in held
        )
        parameters = sum(layer.parameter_bytes for layer in inside)
        read = {a for a, b in profile.edges if a in before and b not in before}
        unread = before - {a for a, _ in profile.edges}
        carried = sum(layer.activation_bytes for layer in profile.layers if layer.name in read | unread)
        if cost == "pipedream":
            worst = max(worst, (slowest + 4 * (m - 1) * parameters / (m * bandwidth)) / m, 2 * carried / bandwidth / m)
        else:
            worst = max(worst, (slowest + 2 * (m - 1) * parameters / bandwidth) / m, carried / bandwidth)
    return worst


def fits(profile, cuts, assignment, devices):
    """PipeDream's stashing: weights and outputs for each mini-batch in flight, gradients once."""
    edges = [0, *cuts, len(profile.layers)]
    replicas = [sum(held.values()) for held in assignment]
    for index, (first, last) in enumerate(itertools.pairwise(edges)):
        flying = math.ceil(sum(replicas[index:]) / replicas[index])
        inside = profile.layers[first:last]
        parameters = sum(layer.parameter_bytes for layer in inside)
        needed = flying * sum(layer.activation_bytes for layer in inside) + (flying + 1) * parameters
        if any(device.memory < needed for device in devices if device.name in assignment[index]):
            return False
    return True


# -- costs ------------------------------------------------------------------------------------------------------------


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
    stash, keep = (Terms(profile, 5, 1.0, COSTS[name]) for name in ("pipedream", "bapipe"))
    # Two replicas in front of three devices: ceil(5 / 2) in flight.
    assert stash.memory(0, 1, (2,), 5) == 3 * (100 + 10) + 10
    assert keep.memory(0, 1, (2,), 5) == 3 * 100 + 2 * 10
    assert keep.memory(1, 2, (1,), 1) == 1000 + 2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cost", ["pipedream", "sparsepipe"])
def test_stage_time_of_any_partition_is_the_sum_by_hand(seed, cost):
    profile, devices = random_profile(seed), random_devices(seed)
    sample = list(itertools.islice(every_partition(6, devices), 0, None, 7))
    assert sample
    for cuts, held in sample:
        found = StagePartition("", tuple(cuts), tuple(cuts), (("",) * 6,), tuple(held), 0.0)
        expected = by_hand(profile, cuts, held, devices, BANDWIDTH, cost)
        assert stage_time(profile, found, devices, BANDWIDTH, cost) == pytest.approx(expected, rel=1e-12)


# -- the searches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_exact_is_as_good_as_brute_force(seed):
    profile, devices = random_profile(seed), random_devices(seed)
    least = min(
        by_hand(profile, cuts, held, devices, BANDWIDTH, "sparsepipe") for cuts, held in every_partition(6, devices)
    )
    found = partition(profile, devices, BANDWIDTH, "exact")
    assert found.time == pytest.approx(least, rel=1e-12)
    again = by_hand(profile, found.cuts, found.assignment, devices, BANDWIDTH, "sparsepipe")
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
    least = min(by_hand(profile, *each, devices, BANDWIDTH, "sparsepipe") for each in allowed)
    found = partition(profile, devices, BANDWIDTH, "exact")
    assert found.time == pytest.approx(least, rel=1e-12)
    assert fits(profile, found.cuts, found.assignment, devices)


@pytest.mark.parametrize("seed", range(4))
def test_pipedream_is_as_good_as_brute_force_on_equal_devices(seed):
    profile, devices = random_profile(seed), [Device("device", 4)]
    least = min(by_hand(profile, *each, devices, BANDWIDTH, "pipedream") for each in every_partition(6, devices))
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
        min(by_hand(profile, *each, devices, BANDWIDTH, "sparsepipe") for each in allowed), rel=1e-12
    )
    assert in_order(found.assignment)


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
    devices = published.devices(row.counts, sparse=False)
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
    profile, devices = published.vgg16_bn("TitanXP", sparse=False), published.devices(row.counts, sparse=False)
    theirs = command.as_published(profile, row, devices, 1e9 / 8)
    found = partition(profile, devices, 1e9 / 8, "exact")
    assert theirs >= found.time
    if found.assignment == row.assignment:
        assert theirs == found.time


def test_the_tables_are_printed_and_bad_input_ends_with_one_line(tmp_path, capsys):
    random_profile(1).save(tmp_path / "net.json")
    arguments = [str(tmp_path / "net.json"), "--devices", "2", "--gigabits", "1", "--json", str(tmp_path / "out.json")]
    assert command.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "net" in printed and printed.count("SparsePipe, Table III") == 2
    assert (tmp_path / "out.json").stat().st_size > 0
    assert command.main([str(tmp_path / "none.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("partition_tables: profile ") and error.count("\n") == 1
    with pytest.raises(SystemExit) as stopped:
        command.main(["--devices", "0"])
    assert stopped.value.code == 2 and capsys.readouterr().err.count("\n") == 1


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


def test_numpys_numbers_are_devices_times_and_bandwidths():
    profile, times = random_profile(0), np.linspace(1.0, 2.0, 6, dtype=np.float32)
    plain = partition(profile, [Device("gpu", 2, times.tolist(), 1e9)], 1e9)
    devices = [Device("gpu", np.int64(2), times, np.float32(1e9))]
    assert partition(profile, devices, np.float32(1e9)) == plain
    assert partition(profile, np.int64(2), np.int64(10**9)) == partition(profile, 2, 1e9)


@pytest.mark.parametrize(
    "devices, bandwidth, parts",
    [
        (0, 1e9, ("0 devices",)),
        (-3, 1e9, ("-3 devices",)),
        ([], 1e9, ("a list of Device",)),
        (2.0, 1e9, ("devices=2.0", "a number or a list")),
        (True, 1e9, ("devices=True",)),
        (["gpu"], 1e9, ("'gpu'", "a Device")),
        ([Device("gpu"), Device("gpu")], 1e9, ("gpu, gpu", "once")),
        ([Device("gpu", 2, [1.0, 2.0])], 1e9, ("'gpu'", "2 layers", "has 6")),
        (2, 0, ("bandwidth", "found 0", "bytes per second")),
        (2, -1e9, ("bandwidth", "-1000000000.0")),
        (2, math.nan, ("bandwidth", "nan")),
        (2, math.inf, ("bandwidth", "inf")),
        (2, "10 GB/s", ("bandwidth", "'10 GB/s'", "such as 1e9")),
        (2, 10**400, ("bandwidth", "1000")),
        (2, True, ("bandwidth", "True")),
        (2, None, ("bandwidth", "None")),
    ],
)
def test_impossible_devices_and_bandwidths_are_refused(devices, bandwidth, parts):
    with pytest.raises(PartitionError) as raised:
        partition(random_profile(0), devices, bandwidth)
    assert isinstance(raised.value, ValueError) and isinstance(raised.value, dc.DistconvError)
    assert "\n" not in str(raised.value)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    "arguments, part",
    [
        ({"count": 0}, "count=0"),
        ({"count": 1.5}, "count=1.5"),
        ({"count": True}, "count=True"),
        ({"times": [1.0, -1.0]}, "-1.0 as the time of layer 1"),
        ({"times": [math.nan]}, "nan as the time of layer 0"),
        ({"times": 3.0}, "times=3.0"),
        ({"times": ["fast"]}, "'fast' as the time of layer 0"),
        ({"times": [10**400]}, "as the time of layer 0"),
        ({"times": [1e308, 1e308]}, "the sum of its 2 times is too large"),
        ({"memory": 0}, "memory"),
        ({"memory": "16 GB"}, "'16 GB'"),
    ],
)
def test_an_impossible_device_is_refused(arguments, part):
    with pytest.raises(PartitionError, match="device 'gpu'") as raised:
        Device("gpu", **arguments)
    assert part in str(raised.value)


def test_unknown_methods_costs_and_foreign_partitions_are_refused():
    profile = random_profile(0)
    for method in ("best", ["best"]):
        with pytest.raises(PartitionError, match=r"no method .*'best'.*; there are pipedream, "):
            partition(profile, 2, 1e9, method)
    found = partition(profile, 2, 1e9)
    for wrong in (None, "net.txt", profile.layers):
        with pytest.raises(PartitionError, match=r"partition: found .*, expected a Profile"):
            partition(wrong, 2, 1e9)
        with pytest.raises(PartitionError, match=r"stage_time: found .*, expected a Profile"):
            stage_time(wrong, found, 2, 1e9)
        with pytest.raises(PartitionError, match=r"stage_time: found .*, expected what partition\(\) returns"):
            stage_time(profile, wrong, 2, 1e9)
    with pytest.raises(PartitionError, match="no cost 'best'; there are pipedream, "):
        stage_time(profile, found, 2, 1e9, "best")
    with pytest.raises(PartitionError, match=r"6 layers.*the profile 7 layers"):
        stage_time(random_profile(0, layers=7), found, 2, 1e9)
    with pytest.raises(PartitionError, match=r"there are devices \['gpu'\]"):
        stage_time(profile, found, [Device("gpu", 2)], 1e9)
    with pytest.raises(PartitionError, match="has 2 devices 'device', but there are 1"):
        stage_time(profile, found, 1, 1e9)
