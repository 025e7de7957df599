"""Parts of ``distconv reproduce bppsa``, and bad input."""

from __future__ import annotations

import json

from distconv import cli
from tests.jobs.command_lines import assert_refused


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
