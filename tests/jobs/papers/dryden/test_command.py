"""Single tables, printed from the constants that the machine's file holds."""

from __future__ import annotations

from distconv import cli
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import assert_refused, commands_in, option_tests


def test_a_table_is_printed_with_its_error_and_single_layers_after_it(capsys):
    assert cli.main(["reproduce", "dryden", "--tables", "I", "VI-A"]) == 0
    assert_approved("dryden", capsys.readouterr().out)


def test_a_page_is_not_part_of_one(capsys, tmp_path):
    words = ["reproduce", "dryden", "--tables", "I", "--out", str(tmp_path / "page.md")]
    assert_refused(capsys, words, "--out: writes all tables")


test_options_are_approved, test_documented_defaults_hold = option_tests(*commands_in(__file__))
