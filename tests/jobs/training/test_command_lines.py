"""Options that commands share from this folder: what they read, their defaults and their help."""

from __future__ import annotations

import pytest

from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import describe_options, on_any_machine

COMMANDS = ("train classify", "train pointcloud", "train mesh")


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_the_approved_ones(command: str) -> None:
    assert_approved(f"options/{command.replace(' ', '-')}", on_any_machine("\n".join(describe_options(command))))
