"""Simulated times of all schedules with unequal costs, as approved."""

from __future__ import annotations

import pytest

from distconv.pipeline import FAMILIES, schedule, simulate
from tests.jobs.approved import assert_approved

COSTS = {
    "unequal": {
        "forward": [1, 2.5, 1.75],
        "backward": [2, 3.5, 4.25],
        "transfer": [0.3, 0.7, 0.2],
        "update": [0.1, 0.4, 0.2],
    },
    "slow links": {"forward": 1, "backward": 2, "transfer": [3, 2.5, 1.5], "activation": [5, 3, 2]},
    "weight apart": {"forward": 2, "backward": [1, 2, 1.5], "weight": [0.5, 1.25, 2], "update": 0.5},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_timelines(name: str) -> None:
    lines = []
    for title, costs in COSTS.items():
        for microbatches, replicas in ((2, None), (6, None), (6, [2, 1, 3])):
            if replicas and name != "pipedream":
                continue
            found = simulate(schedule(name, 3, microbatches), **costs, replicas=replicas)
            lines.append(
                f"{title}, {microbatches}, {replicas}: {found.makespan:.4g}, work {found.work:.4g}, bubble "
                f"{found.bubble:.4f}, activations {found.peak_activations}"
            )
            for stage in range(3):
                spans = [span for span in found.spans if span.action.stage == stage]
                shown = (
                    f"{s.action.kind}{s.action.microbatch}.{s.action.chunk}@{s.replica}:{s.start:.4g}-{s.end:.4g}"
                    for s in spans
                )
                lines.append(f"    {stage}: {' '.join(shown)}")
    assert_approved(f"timelines/{name}", "\n".join(lines))
