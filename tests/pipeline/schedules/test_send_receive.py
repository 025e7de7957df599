"""Messages between stages: lists run to their end when a send ends only as its receiver takes it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distconv.pipeline import FAMILIES, Action, Kind, Schedule, ScheduleError, schedule
from distconv.pipeline.schedules.send_receive import with_transfers


def run_synchronously(found):
    """Return True if all lists end. A send needs the matching receive at the head of the other list."""
    lists = [list(actions) for actions in found.stages]
    moved = True
    while moved:
        moved = False
        for actions in lists:
            while actions and actions[0].kind not in (Kind.SEND, Kind.RECEIVE):
                actions.pop(0)
                moved = True
        for stage, actions in enumerate(lists):
            if actions and actions[0].kind is Kind.SEND:
                sent, other = actions[0], lists[actions[0].peer]
                head = (Kind.RECEIVE, sent.microbatch, sent.payload, stage)
                if other and (other[0].kind, other[0].microbatch, other[0].payload, other[0].peer) == head:
                    actions.pop(0)
                    other.pop(0)
                    moved = True
    return not any(lists)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=30)
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 12))
def test_synchronous_sends_never_deadlock(name, stages, microbatches):
    assert run_synchronously(schedule(name, stages, microbatches))


def test_neighbours_that_would_send_at_once_take_what_is_sent_first():
    """1F1B: stage 0 sends F1 while stage 1 has B0 to send; so stage 1 receives F1 before it sends."""
    first, second = schedule("1f1b-sno", 2, 3).stages

    def shown(actions):
        return " ".join(
            f"{a.kind}{a.microbatch}" if a.payload is None else f"{a.kind}-{a.payload}{a.microbatch}"
            for a in actions
            if a.kind is not Kind.UPDATE
        )

    assert shown(first) == "F0 send-F0 F1 send-F1 receive-B0 B0 F2 send-F2 receive-B1 B1 receive-B2 B2"
    assert shown(second) == "receive-F0 F0 B0 receive-F1 send-B0 F1 B1 receive-F2 send-B1 F2 B2 send-B2"


def test_passes_that_wait_for_each_other_in_a_circle_are_refused():
    stages = [
        [Action(kind, stage, 0, version=0) for kind in kinds]
        for stage, kinds in enumerate([(Kind.B, Kind.F), (Kind.F, Kind.B)])
    ]
    with pytest.raises(ScheduleError, match="mine: stage 0: B of micro-batch 0 waits for itself"):
        with_transfers(Schedule("mine", stages, 1))
