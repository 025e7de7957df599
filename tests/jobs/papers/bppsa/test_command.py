"""Parts of ``distconv reproduce bppsa`` and their settings, the printed text, and bad input."""

from __future__ import annotations

import json

import pytest
import torch

from distconv import cli
from distconv.jobs.papers.bppsa import command
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import assert_refused, commands_in, noting, option_tests, parsed


def test_parts_are_chosen_by_name_and_bad_input_ends_with_one_line(tmp_path, capsys):
    words, out = ["reproduce", "bppsa"], tmp_path / "out.json"
    assert cli.main([*words, "ranks", "--machines", "localhost", "--json", str(out)]) == 0
    assert list(json.loads(out.read_text())) == ["ranks"]
    capsys.readouterr()
    for arguments, text in (
        (["figure-6"], "figure-6: no data given. Name a folder or file of samples with --data."),
        (["figure-13"], "figure-13: no data given. Name a folder or file of samples with --sounds."),
        (["figure-7"], "'figure-7' is not a valid part. Use one of table-1"),
        (["--prune", "1"], "1 is not in [0, 1)"),
    ):
        assert_refused(capsys, [*words, *arguments], text)


test_options_are_approved, test_documented_defaults_hold = option_tests(*commands_in(__file__))


def test_ranks_to_win_are_printed_as_approved(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main("reproduce bppsa ranks".split()) == 0
    assert_approved("bppsa-ranks", capsys.readouterr().out)


def test_parts_and_their_settings_are_as_approved(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    for part, module in (
        ("table-1", command.jacobian_table),
        ("figure-10", command.pruned_vgg),
        ("ranks", command.ranks_to_win),
        ("figure-6", command.training),
        ("figure-12", command.adam_staleness),
        ("figure-13", command.sound_curves),
    ):
        monkeypatch.setattr(module, "table", noting(lines, part))
    monkeypatch.setattr(command.epochs, "table", noting(lines, "epochs"))
    data = "--data d --sounds s.h5"
    settings = "--columns 9 --prune 0.5 --width 7 --machines lassen --epochs 3 --iterations 11 --batch 13 --rate 0.25"
    for words in ("", data, f"{data} {settings}", "ranks table-1"):
        lines.append(f"reproduce bppsa {words}")
        command._tables(parsed("reproduce bppsa", *words.split()), torch.device("cpu"))
    assert_approved("bppsa-parts", "\n".join(lines))
