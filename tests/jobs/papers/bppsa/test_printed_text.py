"""What the options of ``distconv reproduce bppsa`` come to, and a table that is predicted: approved as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distconv import cli
from distconv.jobs.papers.bppsa import command
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import Line, pairs, parsed


def test_ranks_to_win_are_printed_as_approved(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main("reproduce bppsa ranks".split()) == 0
    assert_approved("bppsa-ranks", capsys.readouterr().out)


@pytest.mark.parametrize(
    "line",
    pairs(
        [("--columns 9", {"columns": 9})],
        [("--prune 0.5", {"prune": 0.5})],
        [("--width 7", {"width": 7})],
        [("--machines lassen", {"machines": ["lassen"]})],
        [("--data d", {"data": Path("d")})],
        [("--sounds s.h5", {"sounds": Path("s.h5")})],
        [("--epochs 3", {"epochs": 3})],
        [("--iterations 11", {"iterations": 11})],
        [("--batch 13", {"batch": 13})],
        [("--rate 0.25", {"rate": 0.25})],
    ),
    ids=str,
)
def test_parts_are_those_whose_data_are_given_with_the_settings_of_the_options(line: Line, monkeypatch: Any) -> None:
    made: dict[str, Any] = {}

    def noted(name: str) -> Any:
        return lambda *given, **named: made.update({name: (*given, *named.values())})

    for part, module in (
        ("table-1", command.jacobian_table),
        ("figure-10", command.pruned_vgg),
        ("ranks", command.ranks_to_win),
        ("figure-6", command.training),
        ("figure-12", command.adam_staleness),
        ("figure-13", command.sound_curves),
    ):
        monkeypatch.setattr(module, "table", noted(part))
    monkeypatch.setattr(command.epochs, "table", lambda name, rows, device: made.update({name: (rows, device)}))
    command._tables(parsed("reproduce bppsa", *line.words), torch.device("cpu"))
    of = {"columns": 64, "prune": 0.97, "width": 64, "machines": ["localhost", "lassen", "h200-node"]}
    of |= {"data": None, "sounds": None, "epochs": 5, "iterations": 40, "batch": 256, "rate": None}
    of |= dict(line.expected)
    rates = {name: of["rate"] or default for name, default in (("6", 0.001), ("10", command.pruned_vgg.RATE))}
    recipe = of["data"] and command.pruned_vgg.PrunedVggRecipe(of["data"], of["iterations"], of["batch"], rates["10"])
    expected: dict[str, Any] = {
        "table-1": (of["columns"],),
        "figure-10": (of["prune"], of["width"], recipe),
        "ranks": (of["machines"], command.CASES),
    }
    expected |= {f"table-{i}": (command.epochs.TABLES[f"table-{i}"], torch.device("cpu")) for i in (4, 5, 6)}
    if of["data"]:
        expected["figure-6"] = (of["data"], of["iterations"], of["batch"], of["rate"] or command.training.RATE)
        expected["figure-12"] = (of["data"], of["iterations"], of["batch"], of["width"])
    if of["sounds"]:
        expected["figure-13"] = (of["sounds"], of["epochs"])
    assert made == expected
    made.clear()
    command._tables(parsed("reproduce bppsa", "ranks", "table-1", *line.words), torch.device("cpu"))
    assert list(made) == ["ranks", "table-1"]
