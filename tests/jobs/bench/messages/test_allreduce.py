"""``distconv bench allreduce``: its table and its figures."""

from __future__ import annotations

from typing import Any

import pytest

from distconv import cli
from distconv.jobs.bench.messages import allreduce
from tests.jobs.bench import command
from tests.jobs.bench.command import assert_ratios_are_printed

printing = command.printing


@pytest.mark.ranks(2)
def test_it_is_timed_against_raw_mpi(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *["allreduce", "--width", "2", "--repeats", "2"]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert bool(lines) == (comm.rank == 0)
    if lines:
        assert_ratios_are_printed(lines, ["Allreduce", "gradients"])


def test_the_printed_text_is_as_approved(printing: command.Printing) -> None:
    printing.approve("allreduce", allreduce, "allreduce", "--width", "2", "--repeats", "3")
