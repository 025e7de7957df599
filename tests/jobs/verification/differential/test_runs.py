"""The differential run: a short one on every rank count, and that it sees what it must see."""

from __future__ import annotations

import random

import pytest
import torch

from distconv import cli
from distconv.jobs.verification.differential.draw import Draw
from distconv.jobs.verification.differential.layouts import draw_extents
from distconv.jobs.verification.differential.runs import DifferentialRun, draw_case, drawn
from distconv.jobs.verification.engine.verdicts import BAD, EXACT


def lines(comm, seed, kind, count):
    run = DifferentialRun(comm)
    return [line for _, cases in drawn(seed, kind, range(count)) for case in cases for line in run.lines(kind, case)]


@pytest.mark.long
@pytest.mark.usefixtures("fallback")
@pytest.mark.parametrize(("kind", "count"), [("operators", 40), ("networks", 8)])
def test_a_short_run_finds_no_difference(comm, kind, count):
    found = lines(comm, 11, kind, count)
    assert not [line for line in found if line.verdict in BAD]
    assert sum(line.verdict in EXACT for line in found) > 0.7 * count


@pytest.mark.long
@pytest.mark.ranks(at_least=2)
def test_it_sees_a_gradient_that_is_not_summed(comm, monkeypatch):
    monkeypatch.setattr("distconv.communication.collectives.allreduce", lambda comm, tensor, what: tensor)
    assert sum(line.verdict in BAD for line in lines(comm, 0, "networks", 6)) >= 3


@pytest.mark.long
@pytest.mark.ranks(3)
def test_it_sees_ghosts_that_do_not_come(comm, monkeypatch):
    from distconv.kernels.convolution import Convolution

    monkeypatch.setattr(Convolution, "add", lambda self, y, pieces, weight: y)
    assert sum(line.verdict in BAD for line in lines(comm, 1, "operators", 60)) >= 2


@pytest.mark.ranks(2)
def test_what_is_wrong_is_printed_with_the_command_that_repeats_it(comm, monkeypatch, capsys):
    monkeypatch.setattr("distconv.communication.collectives.allreduce", lambda comm, tensor, what: tensor)
    assert cli.main(["verify", "differential", "--cases", "4", "--only", "networks"]) == 1
    out = capsys.readouterr().out
    assert comm.rank or "mpiexec -n 2 distconv verify differential --seed 0 --only networks --case " in out


def test_a_case_is_the_same_whenever_it_is_drawn():
    first, again, other = (draw_case(seed, 7, "all") for seed in (3, 3, 4))
    assert (first.operator, first.option) == (again.operator, again.option)
    assert (first.operator, first.option) != (other.operator, other.option)
    assert torch.equal(Draw(1, 2).tensor(5), Draw(1, 2).tensor(5))


def test_some_grids_split_channels():
    drawn = [draw_extents(4, 2, random.Random(number)) for number in range(400)]
    assert 40 < sum("c" in extents for extents in drawn) < 120
    assert all(extents for extents in drawn)


@pytest.mark.ranks(2)
def test_the_command_prints_its_counts_and_returns_zero(comm, capsys):
    assert cli.main(["verify", "differential", "--cases", "12", "--seed", "5", "--only", "operators"]) == 0
    out = capsys.readouterr().out
    assert ("2 ranks, seed 5: 12 cases:" in out) == (comm.rank == 0)
    assert ("0 silent differences" in out) == (comm.rank == 0)
