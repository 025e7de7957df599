"""``distconv bench memory``: its table and its figures, and what it refuses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distconv.errors import DistconvError
from distconv.jobs.bench.child_processes import MIB, Peak
from distconv.jobs.bench.steps import memory
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import assert_refused, parsed

ROOT = Path(__file__).resolve().parents[4]
JOB = "import sys; from distconv.cli import main; sys.exit(main(sys.argv[1:]))"
TINY = ["memory", "--model", "mesh1k", "--width", "2", "--size", "128"]


@pytest.mark.long
@pytest.mark.time_limit(240)
def test_peaks_are_measured_of_one_rank_and_of_all_with_and_without_a_split_state(mpiexec: Any) -> None:
    """In a job of its own: the peak of a process that has run other tests says nothing."""
    words = ["--model", "vgg16_bn", "--width", "16", "--size", "32", "--batch", "2"]
    arguments = ["bench", "memory", *words, "--optimizer", "adam", "--shard-optimizer"]
    ended = mpiexec(2, JOB, *arguments, timeout=200, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    ranks, split = figures["ranks"], figures["split"]
    for peak in (figures["alone"], *ranks, *split):
        assert 0 < peak["before"] < peak["peak"] and 0 < peak["step_s"] < math.inf
    used, with_split = ([peak["peak"] - peak["before"] for peak in each] for each in (ranks, split))
    assert len(used) == len(with_split) == 2 and max(with_split) < max(used)
    # A small network: nearly all is libraries.
    assert 0.9 < max(peak["peak"] for peak in ranks) / sum(figures["predicted"].values()) < 1.1


def test_the_table_and_the_figures_of_peaks_are_as_approved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "packages_bytes", lambda model: 0)
    alone, *peaks = (Peak(n * MIB, m * MIB, 0.125 * n) for n, m in ((300, 340), (310, 330), (305, 328)))
    split = [replace(peak, peak=peak.peak - 4 * MIB) for peak in peaks]
    grid: Any = SimpleNamespace(size=2, shape={"n": 1, "h": 2}, describe=lambda: "h=2")
    for words, halves in (([], None), (["--width", "16", "--optimizer", "adam", "--shard-optimizer"], split)):
        options = parsed("bench memory", "--size", "128", *words, "--json", str(tmp_path / "memory.json"))
        memory._report(options, grid, alone, peaks, halves)
        *table, last = capsys.readouterr().out.splitlines()
        figures = json.loads((tmp_path / "memory.json").read_text())
        assert json.loads(last) == figures
        shown = {name: value for name, value in figures.items() if name not in ("command", "machine")}
        assert_approved(f"bench-memory-{len(words)}", "\n".join([*table, json.dumps(shown)]))


@pytest.mark.ranks(2)
def test_what_the_run_on_one_rank_dies_of_is_raised_on_all(comm: Any, capsys: Any, monkeypatch: Any) -> None:
    def failing(words: list[str]) -> None:
        raise DistconvError("the process that runs one rank failed (exit code 9): killed")

    monkeypatch.setattr(memory, "run_in_new_process", failing)
    assert_refused(capsys, ["bench", *TINY], "the process that runs one rank failed (exit code 9): killed")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "h=3"], "process grid h=3 has 3 parts but the communicator has 2 ranks"),
        (["--size", "0"], "argument --size: '0' is not a positive integer"),
        (["--model", "nothing"], "--model nothing: no such model"),
        (["--json", "/gone/memory.json"], "argument --json: no such folder (/gone). Create it first"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    comm: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert_refused(capsys, ["bench", *TINY, *arguments], message)
