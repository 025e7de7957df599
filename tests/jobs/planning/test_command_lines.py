"""Options that commands share from this folder: what they read, their defaults and their help."""

from __future__ import annotations

from tests.jobs.command_lines import option_tests

test_options_are_the_approved_ones, _ = option_tests("plan", "explore", "profile", "plan pointcloud")
