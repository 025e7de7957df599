"""``distconv bench memory``: its table and its figures, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.bench.command import outcome

ROOT = Path(__file__).resolve().parents[4]
JOB = "import sys; from distconv.cli import main; sys.exit(main(sys.argv[1:]))"
TINY = ["memory", "--model", "mesh1k", "--width", "2", "--size", "128"]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.time_limit(240)
def test_figures_are_those_of_the_table_and_ratios_are_quotients_of_peaks(
    ranks: int, mpiexec: Any, tmp_path: Path
) -> None:
    """In a job of its own: the peak of a process that has run other tests says nothing."""
    path = tmp_path / "memory.json"
    arguments = ["bench", *TINY, "--grid", f"h={ranks}", "--json", str(path)]
    ended = mpiexec(ranks, JOB, *arguments, timeout=200, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    lines, figures = ended.stdout.splitlines(), json.loads(path.read_text())
    assert lines[0] == "mesh1k of width 2, 1 x 18 x 128 x 128, float32, cpu, one step of SGD"
    assert (figures["model"], figures["size"], figures["grid"]) == ("mesh1k", 128, f"h={ranks}")
    rows = {"one rank": figures["alone"]} | {f"h={ranks}, rank {i}": peak for i, peak in enumerate(figures["ranks"])}
    assert len(rows) == 1 + ranks
    for name, peak in rows.items():
        assert set(peak) == {"before", "peak", "step_s"}
        assert 0 < peak["before"] < peak["peak"] and 0 < peak["step_s"] < math.inf
        shown = [f"{size / 2**20:.0f}" for size in (peak["peak"], peak["before"], peak["peak"] - peak["before"])]
        row = next(line for line in lines if line.startswith(f"{name} "))
        assert row.removeprefix(name).split()[:6:2] == shown
    used, alone = [peak["peak"] - peak["before"] for peak in figures["ranks"]], figures["alone"]
    assert figures["ratio"] == max(used) / (alone["peak"] - alone["before"])
    assert figures["process_ratio"] == max(peak["peak"] for peak in figures["ranks"]) / alone["peak"]
    assert f"against one rank: {figures['ratio']:.3f} (1/{ranks} = {1 / ranks:.3f})" in lines[-4]
    assert json.loads(lines[-1]) == figures
    predicted = sum(figures["predicted"].values())
    worst = max(peak["peak"] for peak in figures["ranks"])
    assert lines[-2].endswith(f"worst rank: measured / predicted {worst / predicted:.2f}")
    # A tiny network: nearly all is libraries.
    assert 0.9 < worst / predicted < 1.1
    assert lines[-3].endswith(f"libraries included:  {figures['process_ratio']:.3f}")


@pytest.mark.long
@pytest.mark.time_limit(240)
def test_split_state_is_measured_beside_whole_state(mpiexec: Any) -> None:
    words = ["--model", "vgg16_bn", "--width", "16", "--size", "32", "--batch", "2"]
    arguments = ["bench", "memory", *words, "--optimizer", "adam", "--shard-optimizer"]
    ended = mpiexec(2, JOB, *arguments, timeout=200, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    figures = json.loads(lines[-1])
    assert lines[0] == "vgg16_bn of width 16, 2 x 3 x 32 x 32, float32, cpu, two steps of Adam"
    used, split = ([peak["peak"] - peak["before"] for peak in figures[key]] for key in ("ranks", "split"))
    assert len(used) == len(split) == 2 and max(split) < max(used)
    assert lines[-2].endswith(f"with split state: {max(split) / 2**20:.0f} of {max(used) / 2**20:.0f} MiB")


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "h=3"], "process grid h=3 has 3 parts but the communicator has 2 ranks"),
        (["--size", "0"], "argument --size: '0' is not a positive integer"),
        (["--model", "nothing"], "--model nothing: no such model"),
        (["--json", "/gone/memory.json"], "argument --json: no such folder (/gone). Create it first"),
        # What the run on one rank dies of.
        (["--size", "8"], "the process that runs one rank failed (exit code "),
    ],
)
@pytest.mark.time_limit(180)
def test_bad_input_is_one_line_and_exit_code_2(
    comm: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, errors = outcome([*TINY, *arguments], capsys)
    assert code == 2
    assert errors == "" if comm.rank else (message in errors and errors.count("\n") == 1)
