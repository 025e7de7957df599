"""Every schedule can run, for any counts; its order is the one that its paper draws; bad input is one clear line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distconv.pipeline import FAMILIES, schedule, simulate, validate
from distconv.pipeline.schedules.generators import interleaved
from distconv.pipeline.schedules.memory import peak_memory

CASES = [
    *((name, {}) for name in FAMILIES),
    *(("interleaved", {"chunks": chunks}) for chunks in (1, 3, 4)),
    ("pipedream", {"vertical_sync": True}),
    ("stale", {"switch_after": 1}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
@settings(max_examples=10)
@given(stages=st.integers(1, 7), microbatches=st.integers(1, 20))
def test_a_schedule_of_any_size_is_valid_runs_and_holds_what_its_list_says(name, options, stages, microbatches):
    found = schedule(name, stages, microbatches, **options)
    validate(found)
    timeline = simulate(found, 1, 2, transfer=0.3, update=0.1)
    assert timeline.peak_activations == [memory.in_flight for memory in peak_memory(found)]


DRAWN = {
    ("1f1b-sno", 3, 4): ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
    ("1f1b-so", 2, 6): ["F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5", "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5"],
    ("stale", 2, 5): ["F0 F1 F2 B0 F3 B1 F4 B2 B3 B4", "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"],
    ("interleaved", 2, 2): ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1", "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1"],
    ("zero-bubble", 3, 3): ["F0 F1 F2 B0 W0 B1 W1 B2 W2", "F0 F1 B0 F2 B1 W0 B2 W1 W2", "F0 B0 F1 B1 F2 B2 W0 W1 W2"],
}
"""Figures 6a and 6b of BaPipe, and drawings of the other papers, by name, stages and micro-batches."""


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_passes_are_in_the_order_of_the_papers_figure(case):
    lines = str(schedule(*case)).splitlines()[1:]
    assert lines == [f"  stage {stage}: {passes}" for stage, passes in enumerate(DRAWN[case])]


def test_a_smaller_last_group_keeps_the_order_of_a_whole_one():
    whole, part = interleaved(4, 8, 3), interleaved(4, 6, 3)
    assert part == [[step for step in steps if step.microbatch < 6] for steps in whole]
