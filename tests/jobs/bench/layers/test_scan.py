"""``distconv bench scan``: ratios to the fastest method, and the printed text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from distconv import cli
from distconv.jobs.bench.layers import scan
from distconv.layers.recurrent import Method
from tests.jobs.bench import command

printing = command.printing

SMALL = "--steps 3 40 --batch 2 --hidden 4 --rounds 1".split()


@pytest.mark.ranks(2)
def test_ratios_are_to_the_fastest_method_that_ranks_have(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "scan", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert bool(lines) == (comm.rank == 0)
    if lines:
        assert "rnn of 4 hidden values, float32, forward and backward, 2 rank(s)" in lines[0]
        found = json.loads(lines[-1])
        assert [(cell["steps"], cell["batch"]) for cell in found["cells"]] == [(3, 2), (40, 2)]
        for cell in found["cells"]:
            times = cell["least_s"]
            assert set(times) == {"autograd", "sequential", "blelloch", "truncated"}
            offered = [s for way, s in times.items() if way != "autograd"]
            assert cell["auto_ratio"] == times[cell["auto"]] / min(offered) >= 1
            assert cell["speedup"] == times["autograd"] / min(offered)
        good = sum(cell["auto_ratio"] <= scan.NEAR for cell in found["cells"])
        assert lines[-2] == f"auto is within 10% of the fastest in {good} of 2 cells"


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
