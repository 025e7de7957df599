"""Printed tables and written JSON of benchmarks."""

from __future__ import annotations

import importlib
import io
import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from distconv import cli
from distconv.jobs.bench import report
from distconv.jobs.bench.report import TimeComparison, comparison_head, comparison_row
from tests.jobs.command_lines import assert_refused


def test_figures_are_a_line_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    report.print_json({"median_s": 0.5}, None)
    assert not path.exists()
    report.print_json({"median_s": 0.5}, path)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [path.read_text().strip()] * 2
    found = json.loads(lines[0])
    assert found["median_s"] == 0.5
    assert set(found) == {"command", "machine", "median_s"}


@pytest.mark.parametrize("command", [words for words in cli.COMMANDS if words[0] == "bench"], ids=" ".join)
def test_every_benchmark_takes_a_file_and_refuses_one_it_cannot_write(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    said = f"distconv {' '.join(command)}: argument --json: no such folder (/gone). Create it first"
    assert_refused(capsys, [*command, "--json", "/gone/x.json"], said)
    source = Path(importlib.import_module(cli.COMMANDS[command].module).__file__ or "").read_text()
    assert "options.json)" in source


def test_a_line_has_a_value_under_each_head() -> None:
    found = TimeComparison("FP", [0.001, 0.003], 0.004)
    assert comparison_row(found).split() == ["FP", "2.000", "1.414", "4.000", "2.000"]
    assert len(comparison_row(found)) == len(comparison_head("ms"))
    assert found.as_json() == {"mean_s": 0.002, "deviation_s": pytest.approx(2e-6**0.5), "predicted_s": 0.004}


def test_a_table_has_a_line_for_each_and_ratios_of_medians() -> None:
    head, *lines = report.time_table(
        {"a": [0.002], "b": [0.001, 0.003, 0.009]}, "a", suffixes={"b": "  1 MiB"}
    ).splitlines()
    assert head.split() == ["ms", "per", "step", "median", "min", "max", "to", "a"]
    assert [line.split() for line in lines] == [
        ["a", "2.00", "2.00", "2.00", "1.000"],
        ["b", "3.00", "1.00", "9.00", "1.500", "1", "MiB"],
    ]
    assert report.time_table({"b": [0.001]}, "a").splitlines()[1].split() == ["b", "1.00", "1.00", "1.00"]


def test_the_machine_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0: [3, 4, 5]}[pid], raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        report, "open", lambda path: io.StringIO("vendor: a\nmodel name\t: B: 2 GHz \nmodel name: c\n"), raising=False
    )
    found = {"cpu": "B: 2 GHz", "cores": 3, "torch": torch.__version__, "python": platform.python_version()}
    assert report.machine() == found
    monkeypatch.setattr("sys.argv", ["a", "bench", "b"])
    assert report.heading("a step").splitlines() == [
        "a step",
        "command: distconv bench b",
        f"machine: cpu B: 2 GHz, cores 3, torch {found['torch']}, python {found['python']}",
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert report.machine() == found | {"gpu": "a GPU"}
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert report.machine()["cores"] == 8

    def missing(path: str) -> Any:
        raise OSError(path)

    for opened in (missing, lambda path: io.StringIO("vendor: a\n")):
        monkeypatch.setattr(report, "open", opened, raising=False)
        assert report.machine()["cpu"] == (platform.processor() or platform.machine())
