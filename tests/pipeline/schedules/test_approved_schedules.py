"""All schedules as approved: every action with its version and peer, memory, staleness, and what is rejected."""

from __future__ import annotations

import pytest

from distconv.pipeline import FAMILIES, schedule
from distconv.pipeline.schedules.actions import Weights
from distconv.pipeline.schedules.memory import peak_memory, stale_fraction, staleness
from distconv.pipeline.schedules.registry import ScheduleError
from tests.jobs.approved import assert_approved

OPTIONS = {
    "pipedream": ({"replicas": [2, 1, 3]}, {"vertical_sync": True}, {"weights": "predict"}, {"weights": "recompute"}),
    "spectrain": ({"weights": "newest"},),
    "stale": ({"switch_after": 2}, {"weights": "stash"}),
    "interleaved": ({"chunks": 3}, {"chunks": 1}),
    "gpipe": ({"weights": "recompute"},),
    "zero-bubble": ({"weights": "recompute"},),
}
WRONG = (
    {"chunks": 0},
    {"chunks": 2.5},
    {"vertical_sync": 2},
    {"vertical_sync": True, "replicas": [1, 2, 1]},
    {"vertical_sync": True, "weights": "newest"},
    {"replicas": [1, 2]},
    {"replicas": 0},
    {"switch_after": 9},
    {"switch_after": -1},
    {"weights": "synchronous"},
    {"weights": "oldest"},
    {"depth": 1},
)


@pytest.mark.parametrize("name", FAMILIES)
def test_actions(name: str) -> None:
    lines = []
    for options in ({}, *OPTIONS.get(name, ())):
        for microbatches in (1, 5):
            try:
                found = schedule(name, 3, microbatches, **options)
            except ScheduleError as error:
                lines.append(f"{options}, {microbatches}: {error}")
                continue
            lines += [f"{options}, {microbatches}: {found.options} {found.weights}", str(found)]
            lines += [f"    {memory}" for memory in peak_memory(found)]
            lines.append(f"    staleness {staleness(found)}, {stale_fraction(found, [1, 2, 4]):.4g}")
            for stage, actions in enumerate(found.stages):
                shown = (f"{a.kind}{a.microbatch}.{a.chunk}>{a.peer}v{a.version}{a.payload or ''}" for a in actions)
                lines.append(f"    {stage}: {' '.join(shown)}")
    assert_approved(f"schedules/{name}", "\n".join(lines))


def test_rejected_options() -> None:
    lines = []
    for name in ("gpipe", "pipedream", "stale", "interleaved"):
        for options in WRONG:
            try:
                schedule(name, 3, 4, **options)
                lines.append(f"{name} {options}: accepted")
            except ScheduleError as error:
                lines.append(f"{name} {options}: {error}")
    for stages, microbatches in ((0, 1), (1, 0), (True, 2), (2, 1.5)):
        with pytest.raises(ScheduleError) as error:
            schedule("gpipe", stages, microbatches)
        lines.append(f"{stages!r} {microbatches!r}: {error.value}")
    lines.append(", ".join(f"{each.name} {each.value}" for each in Weights))
    assert_approved("schedules/rejected", "\n".join(lines))
