"""All choices that an exploration compares, and its report, as approved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distconv.perfmodel.exploration.candidate_stages import Overheads
from distconv.perfmodel.exploration.explore import explore
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from distconv.perfmodel.stages.devices import Device
from tests.jobs.approved import assert_approved
from tests.perfmodel.mixed_networks import Flat, digits, uneven_machine

SCHEDULES = ("dp", "gpipe", "1f1b-sno", "1f1b-so", "1f1b-as", "fbp-as")
TIMES = (4.0, 3.0, 7.0, 1.0, 2.5, 6.0, 5.0)
PROFILE = Profile(
    [Layer(f"n{k}", 2e-4 * time, 3.5e-4 * time, int(3e3 * (9 - k)), int(4e3 * time)) for k, time in enumerate(TIMES)],
    [(f"n{k}", f"n{k + 1}") for k in range(len(TIMES) - 1)] + [("n1", "n4")],
)
OLD_AND_NEW = [Device("old", 1, [3e-3 * time for time in TIMES]), Device("new", 2, [1e-3 * time for time in TIMES])]
OVERHEADS = Overheads(pass_s=1e-4, message_s=2e-4, update_s_per_byte=3e-10, blocking=True, join_s=5e-4)
CASES = {
    "plain": {"profile": PROFILE, "devices": 4},
    "joint": {"profile": PROFILE, "devices": 4, "joint": True, "optimizer_slots": 2},
    "shared": {"profile": PROFILE, "devices": 3, "share_layers": True, "microbatches": [2, 4]},
    "kinds": {"profile": PROFILE, "devices": OLD_AND_NEW, "samples": 4, "microbatches": 4},
    "memory": {"profile": PROFILE, "devices": 4, "memory": 1.4e5, "joint": True},
    "cuts": {
        "profile": PROFILE,
        "devices": 2,
        "cuts": ["n2", "n5"],
        "overheads": Overheads(1e-4, 2e-4, 3e-10, True, 5e-4),
    },
    "large nodes": {
        "profile": PROFILE,
        "devices": 8,
        "joint": True,
        "machine": replace(uneven_machine(overlap=False), ranks_per_node=8),
    },
    "graphs": {"profile": lambda size: trace(Flat(), (size, 3, 18, 20)), "devices": 4, "joint": True},
}


@pytest.mark.parametrize("case", CASES)
def test_explorations(case: str) -> None:
    options = dict(CASES[case])
    machine = options.pop("machine", uneven_machine())
    found = explore(options.pop("profile"), machine, options.pop("devices"), 8, schedules=SCHEDULES, **options)
    lines = found.explain().splitlines()
    for choice in found.table:
        held = " ".join(map(digits, choice.memory))
        lines.append(f"{choice}: {digits(choice.time)} s, {held} B, {choice.fits}, cuts {choice.stages.cuts}")
    assert_approved(f"perfmodel/explorations/{case}", "\n".join(lines))
