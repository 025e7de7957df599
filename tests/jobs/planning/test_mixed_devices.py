"""Stages over kinds of devices: the partition of given times, the plan of it, and profiles that do not fit together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from distconv.errors import DistconvError, MachineError
from distconv.jobs.planning.mixed_devices import (
    DeviceMix,
    combine_profiles,
    load_profiles,
    predict_profiles,
    report_lines,
    to_pipeline_plan,
)
from distconv.perfmodel import Layer, Machine, Profile, trace
from distconv.perfmodel.machine.machine import DeviceKind, Roofline
from tests.perfmodel.networks import machine

NAMES = "abcdef"


def equal_layers(seconds: float, outputs: float = 0.0) -> Profile:
    """Six layers of so long each, forward a third of it."""
    return Profile([Layer(name, seconds / 3, 2 * seconds / 3, outputs, 0) for name in NAMES])


def device_mix(kinds: dict[str, int], seconds: dict[str, float]) -> DeviceMix:
    return combine_profiles(
        kinds, machine(), {kind: equal_layers(seconds[kind], 1e6) for kind in kinds}, list(NAMES), None
    )


def test_a_device_of_half_the_speed_gets_half_the_layers() -> None:
    setting = device_mix({"old": 1, "new": 1}, {"old": 2.0, "new": 1.0})
    found = setting.choose_stages("sparsepipe")
    assert [len(stage) for stage in found.stages] == [2, 4] and found.assignment == ({"old": 1}, {"new": 1})
    assert setting.seconds(found) == pytest.approx(4.0)
    # Taken for equal, with the times of the kind that is listed first, they get three layers each, or all of them.
    equal = setting.choose_stages("pipedream")
    assert setting.seconds(equal) == pytest.approx(6.0)


def test_a_plan_has_the_kind_of_each_rank_stage_by_stage() -> None:
    setting = device_mix({"new": 2, "old": 2}, {"old": 4.0, "new": 1.0})
    found = setting.choose_stages("exact")
    plan = to_pipeline_plan(found, "net", 8)
    assert plan.ranks == 4 and plan.schedule == "pipedream" and plan.microbatches == 1
    assert plan.replicas == found.replicas and plan.cuts == tuple(stage[0] for stage in found.stages[1:])
    begin = 0
    for held in found.assignment:
        count = sum(held.values())
        assert sorted(plan.kinds[begin : begin + count]) == sorted(k for k, n in held.items() for _ in range(n))
        begin += count
    said = "\n".join(report_lines(setting, "exact", found))
    assert f"{1e3 * setting.seconds(found):.3f} ms a mini-batch" in said
    assert "sparsepipe: stages of " in said and "pipedream: stages of " in said and "exact: " not in said


def test_the_cut_is_printed_with_its_devices_and_how_much_longer_other_cuts_take() -> None:
    # By hand as above: 2 and 4 layers take 4 s, and all six on both, taken for equal, 6 s.
    setting = device_mix({"old": 1, "new": 1}, {"old": 2.0, "new": 1.0})
    equal, exact = setting.choose_stages("pipedream"), setting.choose_stages("exact")
    begins = ", ".join(stage[0] for stage in equal.stages[1:]) or "no cut"
    assert list(report_lines(setting, "sparsepipe", setting.choose_stages("sparsepipe"))) == [
        "pipedream, stages of 1-1 devices: 4000.000 ms a mini-batch in the full pipeline",
        "stage 0, the input to c: on 1 x old",
        "stage 1, c to the output: on 1 x new",
        f"pipedream: stages of {'-'.join(map(str, equal.replicas))} devices ({begins}) 6000.000 ms, 1.50 times as long",
        f"exact: stages of {'-'.join(map(str, exact.replicas))} devices (e) 4000.000 ms, 1.00 times as long",
    ]


def test_kinds_of_different_networks_are_refused_with_both() -> None:
    profiles = {"old": equal_layers(1.0), "new": Profile([Layer("z", 1.0, 1.0, 0, 0)])}
    with pytest.raises(DistconvError, match=r"new and old have different layers or split points \(1 layers.*; 6"):
        combine_profiles({"old": 1, "new": 1}, machine(), profiles, list(NAMES), None)


def test_a_kind_without_a_profile_is_refused_with_how_to_get_one(tmp_path: Path) -> None:
    equal_layers(1.0).save(tmp_path / "old.json")
    assert load_profiles(tmp_path, {"old": 1})["old"] == equal_layers(1.0)
    with pytest.raises(
        DistconvError, match=r"no new\.json. Write a profile of each device type with distconv profile --layers"
    ):
        load_profiles(tmp_path, {"old": 1, "new": 1})


def test_kinds_of_a_machines_file_have_its_times_and_memory() -> None:
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    graph, fast = trace(network, (32, 64)), Roofline(1e9, 1e12, 0.0)
    kinds = {"old": DeviceKind(2e9, replace(fast, flops_per_s=0.5e9)), "new": DeviceKind(1e9, fast)}
    cluster: Machine = replace(machine(), kinds=kinds)
    profiles = predict_profiles(graph, cluster, {"old": 1, "new": 1})
    old, new = (sum(layer.time_s for layer in profiles[kind].layers) for kind in ("old", "new"))
    assert old / new == pytest.approx(2.0, rel=0.02)
    setting = combine_profiles({"old": 1, "new": 1}, cluster, profiles, ["2"], None)
    assert [device.memory for device in setting.devices] == [2e9, 1e9]
    assert [d.memory for d in combine_profiles({"old": 1, "new": 1}, cluster, profiles, ["2"], 5e8).devices] == [
        5e8,
        5e8,
    ]
    with pytest.raises(MachineError, match="there is no kind of device 'odd'"):
        predict_profiles(graph, cluster, {"odd": 1})
