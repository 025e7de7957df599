"""Devices: NumPy's numbers count, and what cannot be is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

import distconv as dc
from distconv.perfmodel.stages.partition import Device, PartitionError, partition
from tests.perfmodel.stages.partitions import random_profile


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
