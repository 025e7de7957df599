"""What benchmarks print and write."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from distconv import cli
from distconv.jobs.bench import report
from tests.jobs.bench.command import outcome


def test_figures_are_a_line_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    report.give_json({"median_s": 0.5}, None)
    assert not path.exists()
    report.give_json({"median_s": 0.5}, path)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [path.read_text().strip()] * 2
    found = json.loads(lines[0])
    assert found["median_s"] == 0.5
    assert set(found) == {"command", "machine", "median_s"}


@pytest.mark.parametrize("command", [words for words in cli.COMMANDS if words[0] == "bench"], ids=" ".join)
def test_every_benchmark_takes_a_file_and_refuses_one_it_cannot_write(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = outcome([*command[1:], "--json", "/gone/x.json"], capsys)
    said = "argument --json: there is no folder /gone; make it first"
    assert code == 2 and error.startswith(f"distconv {' '.join(command)}: {said}") and error.count("\n") == 1
    source = Path(importlib.import_module(cli.COMMANDS[command].module).__file__ or "").read_text()
    assert "options.json)" in source
