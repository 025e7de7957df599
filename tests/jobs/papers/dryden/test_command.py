"""Single tables, printed from the constants that the machine's file holds."""

from __future__ import annotations

import re

from distconv import cli
from tests.jobs.approved import assert_approved


def test_a_table_is_printed_with_its_error_and_single_layers_after_it(capsys):
    assert cli.main(["reproduce", "dryden", "--tables", "I", "VI-A"]) == 0
    out = capsys.readouterr().out
    assert_approved("dryden", out)
    # The paper's Table I, row N=4: 403 ms on one GPU per sample, 66 ms on 16: 6.1 times as fast.
    (row,) = re.findall(r"^\| 4 \| (403 .*)\|$", out, re.M)
    assert [cell.split(" / ")[0] for cell in row.strip().split(" | ")] == ["403", "200", "121", "90.6", "66"]
    assert re.search(r"^\| 4 \| 2\.0.* \| 6\.1", out, re.M)
    assert "mean error of its held-out speed-ups: 3.1%" in out
    assert "Table II" not in out


def test_a_page_is_not_part_of_one(capsys, tmp_path):
    assert cli.main(["reproduce", "dryden", "--tables", "I", "--out", str(tmp_path / "page.md")]) != 0
    assert "--out: writes the full page" in capsys.readouterr().err
