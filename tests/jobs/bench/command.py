"""Runs a benchmark in this process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from distconv import cli


def outcome(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and errors of ``distconv bench`` on this rank."""
    try:
        code = cli.main(["bench", *arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    return code, capsys.readouterr().err
