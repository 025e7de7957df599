"""One rank of a test job: ``rank.py FOLDER PYTEST_ARGUMENT...``; ranks other than 0 write their output to a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import pytest  # noqa: E402

from tests.harness import launch  # noqa: E402


def main() -> int:
    folder, arguments = Path(sys.argv[1]), sys.argv[2:]
    rank = launch.launched_rank() or 0
    if rank:
        log = os.open(log_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
    files = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "--basetemp", str(folder / f"tmp{rank}")]
    quiet = ["-q", "--no-header", "--no-summary", "--tb=short", "--continue-on-collection-errors"]
    harness = ["-p", "tests.harness.plugin", "-p", "no:cacheprovider", "--results", str(folder)]
    return int(pytest.main([*files, *quiet, *harness, *arguments]))


def log_path(folder: Path, rank: int) -> Path:
    """Where rank ``rank`` (not 0) writes what it prints."""
    return folder / f"rank{rank}.log"


if __name__ == "__main__":
    sys.exit(main())
