"""``distconv bench halo``: its table and its figures, and what it refuses."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from distconv import cli
from distconv.jobs.bench.messages import halo
from tests.jobs.bench import command
from tests.jobs.command_lines import assert_refused

printing = command.printing

TINY = ["halo", "--size", "12", "16", "--channels", "3", "--batch", "2", "--kernel", "5", "--repeats", "3"]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("axes", ["h={}", "n=2,w={}"])
def test_exchange_and_adjoint_are_timed_against_bare_messages(
    comm: Any, capsys: pytest.CaptureFixture[str], axes: str
) -> None:
    grid = axes.format(comm.size if axes.startswith("h") else comm.size // 2).replace(",w=1", "")
    assert cli.main(["bench", *TINY, "--grid", grid]) == 0
    lines = capsys.readouterr().out.splitlines()
    if comm.rank:
        assert lines == []
        return
    assert lines[0] == f"halo exchange over {grid}, float32, kernel 5"
    figures = json.loads(lines[-1])
    assert set(figures) == {"command", "machine", "median_s"}
    assert list(figures["median_s"]) == ["12", "16"]
    for size, medians in figures["median_s"].items():
        sent = halo_bytes(grid, comm.size, int(size))
        start = lines.index(f"x (2, 3, {size}, {size}), at most {sent} bytes sent per rank")
        assert list(medians) == ["bare messages", "raw", "halo exchange", "halo accumulation"]
        for line, (name, median) in zip(lines[start + 2 :], medians.items(), strict=False):
            assert 0 < median < math.inf
            assert line.startswith(f"{name} ")
            printed, low, high, ratio = line.split()[-4:]
            assert printed == f"{1e3 * median:.2f}" and float(low) <= float(printed) <= float(high)
            assert ratio == f"{median / medians['raw']:.3f}"


def halo_bytes(grid: str, ranks: int, size: int) -> int:
    """Two rows (or columns) of each channel of each sample of float32 to each neighbour."""
    neighbours, samples = (min(2, ranks - 1), 2) if grid.startswith("h") else (min(2, ranks // 2 - 1), 1)
    return neighbours * samples * 3 * 2 * size * 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "h=3"], "process grid h=3 has 3 parts but the communicator has 2 ranks"),
        (["--grid", "2"], "argument --grid: grid '2': '2' is not one axis=parts"),
        (["--kernel", "4"], "--kernel 4: the kernel size must be odd. Use 5"),
        (["--repeats", "0"], "argument --repeats: '0' is not a positive integer"),
        (["--size", "0"], "argument --size: '0' is not a positive integer"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    comm: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert_refused(capsys, ["bench", *TINY, *arguments], message)


def test_the_printed_text_is_as_approved(printing: command.Printing) -> None:
    printing.approve("halo", halo, *TINY, "--grid", "n=1")
