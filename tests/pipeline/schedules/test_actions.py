"""Actions: kinds as text, and which way a message goes."""

from __future__ import annotations

import pytest

from distconv.pipeline import Action, Kind, Schedule, ScheduleError, simulate, validate


def test_kinds_may_be_text_and_a_message_to_a_later_stage_is_an_activation():
    first = [Action("F", 0, 0, 0, None, 0), Action("send", 0, 0, 0, 1), Action("receive", 0, 0, 0, 1)]
    last = [Action("receive", 1, 0, 0, 0), Action("F", 1, 0, 0, None, 0), Action("B", 1, 0, 0, None, 0)]
    stages = [[*first, Action("B", 0, 0, 0, None, 0)], [*last, Action("send", 1, 0, 0, 0)]]
    found = Schedule("by hand", stages, 1)
    validate(found)
    assert [action.payload for action in stages[0]] == [None, Kind.F, Kind.B, None]
    assert simulate(found, forward=[1, 2], backward=[2, 1], transfer=0.5).makespan == 1 + 0.5 + 2 + 1 + 0.5 + 2


@pytest.mark.parametrize("kind", ["X", None, 3])
def test_a_kind_that_does_not_exist_is_refused(kind):
    with pytest.raises(ScheduleError, match=f"kind of action {kind!r} is not valid; use one of F, B, W, send"):
        Action(kind, 0, 0)
