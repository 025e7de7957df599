"""What ``distconv reproduce bapipe`` prints, and which machine its tables are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from distconv.jobs.papers.bapipe import command, cuts
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import Line, pairs, parsed


def by_hand(parameter_bytes: float) -> Callable[[int], Profile]:
    """A network of eight layers whose times and outputs grow with the samples."""

    def layer(index: int, size: int) -> Layer:
        times = size * 1e-5 * (1 + index % 3), size * 2.1e-5 * (1 + index % 3)
        return Layer(f"l{index}", *times, size * 1e4, parameter_bytes)

    return lambda size: Profile([layer(index, size) for index in range(8)])


def test_rows_of_table_iii_are_printed_as_approved(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small networks, with many and with few parameters."""
    profiles = {"VGG-16": by_hand(4e7), "ResNet-50": by_hand(4e4)}
    monkeypatch.setattr(command, "networks", lambda machine: profiles)
    rows = tuple(row for row in command.TABLE_III if row.model in profiles and row.gpus < 8)
    monkeypatch.setattr(command, "TABLE_III", rows)
    machine = Machine.load("v100-pcie")
    given = command.table_iii(machine, 16e9, 2e9)
    command.table_iii(machine, 16e9, None)
    command.table_iii(machine, None, None)
    assert_approved("bapipe-table-iii", capsys.readouterr().out)
    assert [(row["model"], row["gpus"]) for row in given] == [(row.model, row.gpus) for row in rows]


def test_the_table_of_cuts_is_printed_as_approved(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The returned numbers are those in the table. The network is small."""
    monkeypatch.setattr(cuts, "networks", lambda machine: {"small": by_hand(4e6)})
    rows = cuts.cuts_table(Machine.load("v100-pcie"))
    printed = capsys.readouterr().out
    assert_approved("bapipe-cuts", printed)
    for row in rows:
        assert f"{row['bapipe_s']:.3f} ({row['bapipe_over']:.3f})" in printed
        assert f"{row['searched_s']:.3f} ({row['searched_over']:.3f})" in printed


@pytest.mark.parametrize(
    "line",
    pairs(
        [("--tables III", {"tables": ["III"]}), ("--tables cuts I-II", {"tables": ["cuts", "I-II"]})],
        [("--machine localhost", {"machine": "localhost"})],
        [("--link 16GB/s", {"link": 16e9})],
        [("--neighbours 2GB/s", {"neighbours": 2e9})],
    ),
    ids=str,
)
def test_tables_are_for_the_machine_and_links_of_the_options(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"tables": ["I-II", "III", "IV", "VI", "cuts"], "machine": "v100-pcie", "link": None, "neighbours": None}
    expected |= dict(line.expected)
    made: dict[str, Any] = {}
    monkeypatch.setattr(command, "fitted_machine", lambda machine: ("fitted", machine.name))
    monkeypatch.setattr(command, "schedules_table", lambda: made.update({"I-II": ()}))
    monkeypatch.setattr(command, "table_vi", lambda: made.update(VI=()))
    monkeypatch.setattr(command, "table_iv", lambda machine: made.update(IV=machine.name))
    monkeypatch.setattr(command, "cuts_table", lambda machine: made.update(cuts=machine))
    monkeypatch.setattr(command, "table_iii", lambda machine, *links: made.update(III=(machine.name, *links)))
    command._tables(parsed("reproduce bapipe", *line.words))
    name = expected["machine"]
    values = {
        "I-II": (),
        "III": (name, expected["link"], expected["neighbours"]),
        "IV": name,
        "VI": (),
        "cuts": ("fitted", name),
    }
    assert made == {table: values[table] for table in expected["tables"]}
