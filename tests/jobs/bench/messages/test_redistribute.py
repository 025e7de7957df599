"""``distconv bench redistribute``: its table and its figures."""

from __future__ import annotations

from typing import Any

import pytest

from distconv import cli
from tests.jobs.bench.command import assert_ratios_are_printed


@pytest.mark.ranks(2)
def test_it_is_timed_against_raw_mpi(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *["redistribute", "--size", "6", "9", "--repeats", "2"]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert bool(lines) == (comm.rank == 0)
    if lines:
        assert_ratios_are_printed(lines, ["Alltoallv", "messages", "redistribute"])
