"""``distconv bench scan``: what it measures, prints and leaves out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from distconv import cli
from distconv.jobs.bench.layers import scan
from distconv.layers.recurrent import Method
from tests.jobs.bench import command
from tests.jobs.command_lines import assert_refused

printing = command.printing

SMALL = "--steps 3 40 --batch 2 --hidden 4 --rounds 1".split()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("model", ["rnn", "gru"])
def test_it_prints_a_table_and_json(comm: Any, capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert cli.main(["bench", "scan", "--model", model, *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert bool(lines) == (comm.rank == 0)
    if lines:
        assert f"{model} of 4 hidden values, float32, forward and backward, {comm.size} rank(s)" in lines[0]
        found = json.loads(lines[-1])
        assert [(cell["steps"], cell["batch"]) for cell in found["cells"]] == [(3, 2), (40, 2)]
        for cell in found["cells"]:
            times = cell["least_s"]
            assert set(times) == {"autograd", "sequential", "blelloch", "truncated"}
            offered = [s for way, s in times.items() if comm.size == 1 or way != "autograd"]
            assert cell["auto_ratio"] == times[cell["auto"]] / min(offered) >= 1
            assert cell["speedup"] == times["autograd"] / min(offered)
        good = sum(cell["auto_ratio"] <= scan.NEAR for cell in found["cells"])
        assert lines[-2] == f"auto is within 10% of the fastest in {good} of 2 cells"


def test_what_would_take_too_long_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    # By torch a step is 3 * 2 * 2 * 4^2 operations, by a scan 5 / 3 of it; the limit is 5,000 of them.
    assert cli.main(["bench", "scan", *SMALL, "--steps", "3", "20", "40", "--limit", "1e-6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = json.loads(lines[-1])["cells"]
    assert [len(cell["least_s"]) for cell in cells] == [4, 2, 0]
    assert [cell["auto_ratio"] is None for cell in cells] == [False, False, True]


def test_bad_input_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, ["bench", "scan", "--steps", "0"], "argument --steps: '0' is not a positive integer")


def test_the_printed_text_is_as_approved(printing: command.Printing, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter((Method.SEQUENTIAL, Method.AUTOGRAD, Method.BLELLOCH, Method.TRUNCATED) * 2)

    def fastest(problem: Any) -> Method:
        printing.seen.append(str(problem))
        return next(answers)

    monkeypatch.setattr(scan, "fastest_method", fastest)
    monkeypatch.setattr(scan, "is_compiled", lambda *_: True)
    small = ["scan", "--steps", "3", "40", "--batch", "2", "5", "--hidden", "4", "--rounds", "3"]
    printing.approve("scan", scan, *small)
    monkeypatch.setattr(scan, "is_compiled", lambda *_: False)
    printing.approve("scan-gru", scan, *small, "--model", "gru", "--limit", "6e-6")
