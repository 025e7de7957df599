"""``distconv bench scaling``: errors on all ranks, and the printed text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distconv.jobs.bench.steps import scaling
from tests.jobs.bench import command
from tests.jobs.command_lines import assert_refused
from tests.jobs.planning import planned_files
from tests.jobs.verification.pretended import two_ranks

printing = command.printing

folder = planned_files.folder


def words(model: str, *more: str) -> list[str]:
    network = ["--model", f"planned_nets:{model}", "--input", "3,8,8", "--batch", "4", "--machine", "./tiny.yaml"]
    return ["bench", "scaling", *network, "--rounds", "1", *more]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("model", "more", "text"),
    [
        ("gone", [], "has no 'gone'"),
        ("build", ["--plot", "gone/x.png"], "no such folder (gone)"),
        # Rank 1 sleeps while rank 0 finds this out.
        ("Custom", [], "Double"),
    ],
)
def test_what_goes_wrong_on_some_ranks_ends_all(
    comm: Any, capsys: pytest.CaptureFixture[str], model: str, more: list[str], text: str
) -> None:
    assert_refused(capsys, words(model, *more), text)


def test_the_printed_text_is_as_approved(
    printing: command.Printing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_plans(options: Any, comm: Any, ranks: int, plans: Any, device: Any) -> dict[str, list[float]]:
        printing.seen += [f"{ranks} of {comm.size} ranks on {device}, {name}: {plan}" for name, plan in plans.items()]
        return {name: printing.times(count * ranks, options.rounds) for count, name in enumerate(plans)}

    def draw(path: Path, found: Any, times: Any, what: str) -> None:
        printing.seen.append(f"draw {path}, {times}, {what}, {found.curves.keys()}")

    monkeypatch.setattr(scaling, "MPI", SimpleNamespace(COMM_WORLD=two_ranks()))
    monkeypatch.setattr(scaling, "time_plans", time_plans)
    monkeypatch.setattr(scaling.picture, "draw_measured", draw)
    monkeypatch.chdir(tmp_path)
    network = ["--model", "lenet5", "--input", "1,28,28", "--batch", "6", "--machine", "lassen"]
    printing.approve("scaling", None, "scaling", *network, "--predict-to", "8", "--rounds", "3", "--plot", "a.png")
