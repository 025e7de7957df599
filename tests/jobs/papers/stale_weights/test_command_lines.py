"""The options of the commands in this folder: what they read, their defaults and their help."""

from __future__ import annotations

from tests.jobs.command_lines import commands_in, option_tests

test_options_are_approved, test_documented_defaults_hold = option_tests(*commands_in(__file__))
