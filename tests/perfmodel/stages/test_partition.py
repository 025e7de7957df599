"""Stage partitioning: costs by hand, the searches against brute force and an independent one, what is refused."""

from __future__ import annotations

import pytest

from distconv.perfmodel.stages.partition import METHODS, Device, PartitionError, partition, stage_time
from tests.perfmodel.stages.partitions import BANDWIDTH, random_devices, random_profile

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
