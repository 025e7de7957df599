"""What each training command defines about its job: approved as a whole, and the trainers accept their options."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from importlib import import_module

import pytest

from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import parsed

COMMANDS = ("classify", "mesh", "pointcloud", "segmentation", "sequence")


def shown(value: object) -> str:
    """Return a value without addresses, or the name of a function or class."""
    return re.sub(" at 0x[0-9a-f]+", "", getattr(value, "__qualname__", None) or repr(value))


def test_the_jobs_of_the_commands_are_as_approved() -> None:
    lines = []
    for command in COMMANDS:
        job = import_module(f"distconv.jobs.commands.train_{command}").JOB
        lines.append(f"{command}: {type(job).__name__}")
        lines += [f"    {field.name}: {shown(getattr(job, field.name))}" for field in fields(job)]
    assert_approved("training-jobs", "\n".join(lines))


@pytest.mark.parametrize("command", COMMANDS)
def test_trainers_accept_the_options_that_are_passed_to_them(command: str) -> None:
    job = import_module(f"distconv.jobs.commands.train_{command}").JOB
    options = parsed(f"train {command}")
    for name in job.trainer_options:
        assert name in inspect.signature(job.trainer).parameters
        assert hasattr(options, name)
