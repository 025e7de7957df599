"""Figure 13's curves: by scan as by autograd."""

from __future__ import annotations

import pytest

from distconv.jobs.papers.bppsa import sound_curves
from tests.jobs.sequence.sound_files import write_file


def test_sounds_are_learnt_alike_by_scan_and_by_autograd_in_each_setting(tmp_path):
    rows = sound_curves.table(write_file(tmp_path / "tones.h5"), 2)
    assert [(row["set"], row["values"]) for row in rows] == [("S", 19), ("M", 12), ("L", 6)]
    assert rows[0]["frames"] < rows[1]["frames"] < rows[2]["frames"]
    for row in rows:
        plain, scan, _ = row["curves"].values()
        assert [loss for _, loss in scan] == pytest.approx([loss for _, loss in plain], rel=1e-4)
        assert plain[0][0] < plain[1][0] and plain[1][1] < plain[0][1]
