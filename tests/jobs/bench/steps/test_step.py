"""``distconv bench step``: its table and its figures, and what it refuses."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from distconv import cli
from distconv.jobs.bench.steps import step
from tests.jobs.bench import command
from tests.jobs.command_lines import assert_refused, commands_in, option_tests

printing = command.printing

TINY = [
    "step", "--size", "6", "8", "--channels", "2", "--layers", "1", "--batch", "2", "--rounds", "1", "--steps", "1",
    "--no-compile",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.time_limit(180)
def test_every_variant_has_a_median(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *TINY, "--size", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    if comm.rank:
        assert lines == []
        return
    figures = json.loads(lines[-1])
    assert set(figures) == {"command", "machine", "median_s", "moved_bytes"}
    assert list(figures["median_s"]) == ["6"]
    for medians in figures["median_s"].values():
        assert all(0 < median < math.inf for median in medians.values())
        ours, captured, one, *torchs = medians
        assert ours.startswith("distconv, 2 ranks x ") and one.startswith("distconv, 1 rank x ")
        assert captured == f"{ours}, captured"
        assert [name.split(", ")[2] for name in torchs[:2]] == ["as shipped", "heap"]
        assert {f"{torchs[1]}, channels_last", f"{torchs[-2]}, channels_last"} < set(torchs)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "h=3"], "process grid h=3 has 3 parts but the communicator has 2 ranks"),
        (["--grid", "x=2"], "argument --grid: grid 'x=2': 'x=2' is not one axis=parts"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    comm: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert_refused(capsys, ["bench", *TINY, *arguments], message)


def test_the_printed_text_is_as_approved(printing: command.Printing) -> None:
    printing.replace_torch_processes()
    words = [word for word in TINY if word != "--no-compile"]
    printing.approve(
        "step", step, *words, "--size", "7", "--rounds", "3", "--steps", "3", "--memory-format", "channels_last"
    )


test_options_are_approved, test_documented_defaults_hold = option_tests(*commands_in(__file__))
