"""Printed tables and written JSON of benchmarks, and benchmarks on two ranks."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from distconv import cli
from distconv.jobs.bench import report
from distconv.jobs.bench.child_processes import Peak
from distconv.jobs.bench.layers import pointcloud
from distconv.jobs.bench.report import TimeComparison, comparison_head, comparison_row
from distconv.jobs.bench.steps import memory
from tests.jobs.command_lines import assert_refused, commands_in, option_tests
from tests.jobs.planning import planned_files


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


TINY = "--machine ./tiny.yaml"
ON_RANKS = [
    "pipeline --width 2 --batch 4 --microbatches 2 --rounds 1 --steps 1 --model resnet20 --ppv 7",
    "allreduce --width 2 --repeats 2",
    "redistribute --size 6 9 --repeats 2",
    f"layer --layer res3b_branch2a --grid h=2 {TINY}",
    "pointcloud --model vgg16_bn --width 2 --batch 2 --rounds 1 --resolution 32 --keep 0.5",
    "gpu --device cpu --model lenet5 --input 1,28,28 --batch 2 --channels 3 --rounds 2 --no-compile",
    "memory --model lenet5 --input 1,28,28 --batch 2 --optimizer adam --shard-optimizer",
    "safeguards --model mesh1k --width 2 --size 128 --batch 1 --repeats 1 --directory .",
    f"scaling --model lenet5 --input 1,28,28 --batch 4 {TINY} --rounds 1 --predict-to 4",
]


def numbers_in(value: Any) -> list[float]:
    """All numbers of JSON, at any depth."""
    if isinstance(value, (dict, list)):
        return [
            number for each in (value.values() if isinstance(value, dict) else value) for number in numbers_in(each)
        ]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words", ON_RANKS, ids=lambda words: words.split()[0])
def test_rank_0_prints_what_both_ranks_measure_and_no_file_is_left(
    comm: Any, words: str, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if comm.rank == 0:
        (shared_tmp_path / "tiny.yaml").write_text(planned_files.MACHINE)
    comm.Barrier()
    monkeypatch.chdir(shared_tmp_path)
    for module in (memory, pointcloud):
        monkeypatch.setattr(module, "run_in_new_process", lambda words: Peak(1, 3 << 20, 0.5))
    assert cli.main(["bench", *words.split()]) == 0
    comm.Barrier()
    assert not torch.distributed.is_initialized()
    lines = capsys.readouterr().out.splitlines()
    assert bool(lines) == (comm.rank == 0)
    assert [path.name for path in shared_tmp_path.iterdir()] == ["tiny.yaml"]
    if lines:
        figures = json.loads(next(line for line in lines if line.startswith("{")))
        del figures["command"], figures["machine"]
        found = numbers_in(figures)
        assert len(found) >= 2 and all(0 <= number < math.inf for number in found)


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


test_options_are_approved, test_documented_defaults_hold = option_tests(*commands_in(__file__))
