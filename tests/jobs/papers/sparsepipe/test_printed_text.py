"""All that ``distconv reproduce sparsepipe`` prints of a profile and of mixed GPUs: approved as a whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from distconv import cli
from distconv.jobs.papers.sparsepipe import command
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import Line, pairs, parsed
from tests.perfmodel.stages.partitions import random_profile


def test_tables_are_printed_as_approved(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in ((1, "one"), (2, "two")):
        random_profile(seed).save(tmp_path / f"{name}.json")
    words = "one.json two.json --devices 2 3 --bandwidth 2e9 --gigabits 2.5 10 --messages 4"
    assert cli.main(["reproduce", "sparsepipe", *words.split()]) == 0
    assert_approved("sparsepipe", re.sub(r"[\d.]+ ms \(", "T ms (", capsys.readouterr().out))


@pytest.mark.parametrize(
    "line",
    pairs(
        [("--devices 3 5", {"devices": [3, 5]})],
        [("--bandwidth 5e8", {"bandwidth": 5e8})],
        [("--gigabits 1 40", {"gigabits": [1.0, 40.0]})],
        [("--messages 3", {"messages": 3.0})],
        [("--measured other.json", {"measured": "other.json"})],
        [("--measured-batch 8", {"batch": 8})],
    ),
    ids=str,
)
def test_tables_are_of_what_the_options_say(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {"messages": set()}

    class Source:
        def with_larger_messages(self, factor: float) -> Source:
            found["messages"].add(factor)
            return self

    def measured(path: Path, batch: int) -> list[Source]:
        found.update(measured=path.name, batch=batch)
        return [Source()]

    def of_profiles(paths: Any, devices: Any, bandwidth: float) -> list[Any]:
        found.update(profiles=paths, devices=devices, bandwidth=bandwidth)
        return []

    monkeypatch.setattr(command, "mixed_table", lambda source, gigabits: found.update(gigabits=gigabits) or [])
    monkeypatch.setattr(command, "profile_table", of_profiles)
    monkeypatch.setattr(command.published, "by_roofline", lambda sparse: Source())
    monkeypatch.setattr(command.published, "as_measured", measured)
    command._tables(parsed("reproduce sparsepipe", "net.json", *line.words))
    defaults = {"devices": [4, 8], "bandwidth": 1e9, "gigabits": [1, 2.5, 5, 10], "messages": 1.0, "batch": 16}
    expected = defaults | {"measured": command.published.MEASURED.name} | dict(line.expected)
    assert found == {**expected, "messages": {expected["messages"]}, "profiles": ["net.json"]}
