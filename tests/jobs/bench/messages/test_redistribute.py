"""``distconv bench redistribute``: its table and its figures."""

from __future__ import annotations

from typing import Any

import pytest

from distconv import cli
from distconv.jobs.bench.messages import redistribute
from tests.jobs.bench import command
from tests.jobs.bench.command import assert_ratios_are_printed

printing = command.printing


@pytest.mark.ranks(2)
def test_it_is_timed_against_raw_mpi(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *["redistribute", "--size", "6", "9", "--repeats", "2"]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert bool(lines) == (comm.rank == 0)
    if lines:
        assert_ratios_are_printed(lines, ["Alltoallv", "messages", "redistribute"])


def test_the_printed_text_is_as_approved(printing: command.Printing) -> None:
    words = ["--size", "6", "9", "--channels", "3", "--batch", "2", "--repeats", "3"]
    printing.approve("redistribute", redistribute, "redistribute", *words)
