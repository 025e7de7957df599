"""``distconv bench halo``: its table and its figures, and what it refuses."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from distconv import cli
from distconv.jobs.bench.messages import halo
from tests.jobs.bench import command
from tests.jobs.command_lines import assert_refused, commands_in, option_tests

printing = command.printing

TINY = ["halo", "--size", "12", "16", "--channels", "3", "--batch", "2", "--kernel", "5", "--repeats", "3"]


@pytest.mark.ranks(4)
def test_exchange_and_adjoint_are_timed_against_bare_messages(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *TINY, "--grid", "h=4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    if comm.rank:
        assert lines == []
        return
    assert lines[0] == "halo exchange over h=4, float32, kernel 5"
    figures = json.loads(lines[-1])
    assert set(figures) == {"command", "machine", "median_s"} and list(figures["median_s"]) == ["12", "16"]
    for size, medians in figures["median_s"].items():
        sent = 2 * 2 * 3 * 2 * int(size) * 4  # to each of two neighbours, two rows of each channel of each sample
        assert f"x (2, 3, {size}, {size}), at most {sent} bytes sent per rank" in lines
        assert list(medians) == ["bare messages", "raw", "halo exchange", "halo accumulation"]
        assert all(0 < median < math.inf for median in medians.values())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "h=3"], "process grid h=3 has 3 parts but the communicator has 2 ranks"),
        (["--grid", "2"], "argument --grid: grid '2': '2' is not one axis=parts"),
        (["--kernel", "4"], "--kernel 4: the kernel size must be odd. Use 5"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    comm: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert_refused(capsys, ["bench", *TINY, *arguments], message)


def test_the_printed_text_is_as_approved(printing: command.Printing) -> None:
    printing.approve("halo", halo, *TINY, "--grid", "n=1")


test_options_are_approved, test_documented_defaults_hold = option_tests(*commands_in(__file__))
