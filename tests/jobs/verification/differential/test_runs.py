"""The differential run: a short one on every rank count, and that it sees what it must see."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import distconv as dc
from distconv import cli
from distconv.errors import ShapeError, UnsupportedOperation
from distconv.jobs.verification.differential.draw import Draw
from distconv.jobs.verification.differential.runs import Run, draw_case
from distconv.jobs.verification.differential.verdicts import Outcome, Verdict, difference, judge, refusal
from distconv.jobs.verification.differential.worlds import draw_extents
from tests.distconv.layouts import grid_over

EXACT = Outcome()


@pytest.mark.parametrize(("kind", "count"), [("operators", 40), ("networks", 8)])
def test_a_short_run_finds_no_difference(comm, kind, count, capsys):
    tally = Run(comm, seed=11, kind=kind).cases(range(count))
    assert tally.total[Verdict.WRONG] == 0, capsys.readouterr().out
    assert tally.total[Verdict.EXACT] > 0.8 * count, tally.reasons


@pytest.mark.ranks(at_least=2)
def test_it_sees_a_gradient_that_is_not_summed(comm, monkeypatch, capsys):
    monkeypatch.setattr("distconv.communication.collectives.allreduce", lambda comm, tensor, what: tensor)
    tally = Run(comm, seed=0, kind="networks").cases(range(6))
    assert tally.total[Verdict.WRONG] >= 3
    out = capsys.readouterr().out
    assert comm.rank or "distconv verify differential --seed 0 --case" in out


@pytest.mark.ranks(3)
def test_it_sees_ghosts_that_do_not_come(comm, monkeypatch, capsys):
    from distconv.kernels.convolution import Convolution

    monkeypatch.setattr(Convolution, "add", lambda self, y, pieces, weight: y)
    assert Run(comm, seed=1, kind="operators").cases(range(60)).total[Verdict.WRONG] >= 2
    capsys.readouterr()


def test_a_case_is_the_same_whenever_it_is_drawn():
    first, again, other = (draw_case(seed, 7, "all") for seed in (3, 3, 4))
    assert (first.name, first.text) == (again.name, again.text)
    assert (first.name, first.text) != (other.name, other.text)
    assert torch.equal(Draw(1, 2).tensor(5), Draw(1, 2).tensor(5))


def test_some_grids_split_channels():
    drawn = [draw_extents(4, 2, random.Random(number)) for number in range(400)]
    assert 40 < sum("c" in extents for extents in drawn) < 120
    assert all(extents for extents in drawn)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"y": torch.ones(3).double()}, ""),
        ({"y": torch.ones(3).double() + 1e-12}, ""),
        ({"y": torch.ones(3).double() + 1e-9}, "y (3,) differs by 1e-09"),
        ({"y": torch.ones(2).double()}, "y is (2,)"),
        ({"y": torch.ones(3)}, "torch.float32"),
        ({"y": torch.full((3,), torch.nan).double()}, "NaN"),
        ({}, "y is missing"),
        ({"y": torch.ones(3).double(), "dL/dx": torch.ones(1)}, "dL/dx should not be there"),
    ],
)
def test_differences_are_told(found, text):
    told = difference({"y": torch.ones(3).double()}, found)
    assert text in told if text else told == ""


def test_the_tolerance_is_that_of_the_dtype():
    ones = torch.ones(3, dtype=torch.float32)
    assert difference({"y": ones}, {"y": ones + 1e-6}) == ""
    assert "differs by" in difference({"y": ones}, {"y": ones + 1e-4})
    assert difference({"y": ones}, {"y": ones + 1e-4}, condition=100) == ""


def test_blocks_are_compared_where_they_are(comm):
    grid = grid_over(comm, n=comm.size)
    whole = torch.arange(17.0).double()
    x = dc.scatter(whole, grid)
    assert difference({"y": whole}, {"y": x}) == ""
    x.local.add_(comm.rank == comm.size - 1)
    told = comm.allgather(difference({"y": whole}, {"y": x}))
    assert [bool(text) for text in told] == [rank == comm.size - 1 for rank in range(comm.size)]
    wrong = dc.DistTensor(torch.zeros(19).double(), x.dist, x.shape)
    assert "is a block of (19,) where it should be" in difference({"y": whole}, {"y": wrong})


TORCHS = refusal(RuntimeError("too small"))
OURS = Outcome(refusal(ShapeError("too small")))
UNSUPPORTED = Outcome(refusal(UnsupportedOperation("not yet")))


@pytest.mark.parametrize(
    ("reference", "outcomes", "verdict"),
    [
        (None, [EXACT, EXACT], Verdict.EXACT),
        (None, [EXACT, Outcome(difference="y differs")], Verdict.WRONG),
        (TORCHS, [EXACT, EXACT], Verdict.WRONG),
        (TORCHS, [OURS, OURS], Verdict.REFUSED),
        (TORCHS, [OURS, EXACT], Verdict.WRONG),
        (TORCHS, [Outcome(refusal(ShapeError("no")))] * 2, Verdict.OTHER_WORDS),
        (None, [OURS, OURS], Verdict.UNSUPPORTED),
        (None, [UNSUPPORTED, UNSUPPORTED], Verdict.UNSUPPORTED),
        (None, [UNSUPPORTED, Outcome(refusal(UnsupportedOperation("nor this")))], Verdict.WRONG),
        (None, [Outcome(refusal(KeyError("h")))] * 2, Verdict.WRONG),
    ],
)
def test_verdicts(reference, outcomes, verdict):
    assert judge(reference, outcomes)[0] is verdict


@pytest.mark.ranks(2)
def test_the_command_prints_its_counts_and_returns_zero(comm, capsys):
    assert cli.main(["verify", "differential", "--cases", "12", "--seed", "5", "--only", "operators"]) == 0
    out = capsys.readouterr().out
    assert ("2 ranks, seed 5: 12 cases:" in out) == (comm.rank == 0)
    assert ("0 silent differences" in out) == (comm.rank == 0)


@pytest.mark.mpi
@pytest.mark.time_limit(120)
def test_the_command_starts_its_own_jobs():
    root = Path(__file__).resolve().parents[4]
    command = [sys.executable, "-m", "distconv", "verify", "differential", "--ranks", "1,2", "--case", "3"]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "== 2 ranks" in ended.stdout
    assert "exact: case 3:" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "0"], "'0' is not a whole number above zero"),
        (["--ranks", "1,x"], "'x' is not a whole number above zero"),
        (["--ranks", "1", "--mpiexec", "/nowhere"], "--mpiexec /nowhere: [Errno 2]"),
    ],
)
@pytest.mark.ranks(1)
def test_bad_input_is_one_line(comm, capsys, arguments, message):
    try:
        code = cli.main(["verify", "differential", *arguments])
    except SystemExit as stopped:
        code = stopped.code
    error = capsys.readouterr().err
    assert code == 2 and message in error and error.count("\n") == 1
