"""The printed rows of Tables I and II: the paper's formulas, which ours have to give without being told."""

from __future__ import annotations

import pytest

from distconv.jobs.papers.bapipe.schedules import schedules_table
from tests.jobs.approved import assert_approved


def test_the_rows_are_the_papers_and_printed_as_approved(capsys):
    rows = {row["schedule"]: row for row in schedules_table()}
    for row in rows.values():
        for paper, *ours in (row["time_s"], row["features"]):
            assert ours == pytest.approx([paper, paper])
    hidden = {name: [round(seconds, 3) for seconds in row["longest_transfer_s"]] for name, row in rows.items()}
    assert hidden["1f1b-as"] == [1, 1, 1]  # a / F
    assert hidden["fbp-as"] == [1.5, 1.5, 1.5]  # 2 a / (F + B)
    assert hidden["1f1b-sno"][1:] == [0, 0]
    assert hidden["1f1b-so"][1:] == [1.5, 1.5]
    assert_approved("bapipe-schedules", capsys.readouterr().out)
