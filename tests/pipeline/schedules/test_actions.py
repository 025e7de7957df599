"""Actions: kinds as text, and which way a message goes."""

from __future__ import annotations

import pytest

from distconv.pipeline import Action, Kind, Schedule, ScheduleError, schedule, simulate, validate


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


def test_a_part_of_a_chunk_comes_behind_all_stages_of_the_chunk_before():
    """Two stages of two chunks: parts 0 and 2 are on the first, 1 and 3 on the second."""
    found = schedule("interleaved", 2, 2, chunks=2)
    passes = {
        (stage, chunk, kind): Action(kind, stage, 1, chunk) for stage in (0, 1) for chunk in (0, 1) for kind in "FB"
    }
    needed = {at: found.input_of(action) for at, action in passes.items()}
    assert {at: message and (message.payload, message.part) for at, message in needed.items()} == {
        (0, 0, "F"): None, (1, 0, "F"): ("F", 1), (0, 1, "F"): ("F", 2), (1, 1, "F"): ("F", 3),
        (1, 1, "B"): None, (0, 1, "B"): ("B", 2), (1, 0, "B"): ("B", 1), (0, 0, "B"): ("B", 0),
    }  # fmt: skip
    made = {at: found.output_of(action) for at, action in passes.items()}
    assert {at: message and (message.payload, message.part) for at, message in made.items()} == {
        (0, 0, "F"): ("F", 1), (1, 0, "F"): ("F", 2), (0, 1, "F"): ("F", 3), (1, 1, "F"): None,
        (1, 1, "B"): ("B", 2), (0, 1, "B"): ("B", 1), (1, 0, "B"): ("B", 0), (0, 0, "B"): None,
    }  # fmt: skip
