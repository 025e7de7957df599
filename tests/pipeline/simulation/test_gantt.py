"""Pictures of schedules."""

from __future__ import annotations

import pytest

from distconv.pipeline import FAMILIES, ScheduleError, schedule, simulate

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_can_be_drawn(name, tmp_path):
    simulate(schedule(name, 3, 5), [1, 2, 1.5], 2, update=0.5).plot(tmp_path / "gantt.png")
    assert (tmp_path / "gantt.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("path", ["", "picture"])
def test_a_picture_needs_an_ending(path, tmp_path):
    with pytest.raises(ScheduleError, match="has no ending that says the format"):
        simulate(schedule("gpipe", 2, 2), 1, 2).plot(tmp_path / path)
    assert list(tmp_path.iterdir()) == []
