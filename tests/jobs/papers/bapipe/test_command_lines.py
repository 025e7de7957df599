"""The options of the commands in this folder: what they read, their defaults and their help."""

from __future__ import annotations

import pytest

from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import assert_documented_defaults, commands_in, describe_options, on_any_machine

COMMANDS = commands_in(__file__)


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_the_approved_ones(command: str) -> None:
    assert_approved(f"options/{command.replace(' ', '-')}", on_any_machine("\n".join(describe_options(command))))


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_defaults_are_those_without_options(command: str) -> None:
    assert_documented_defaults(command)
