"""Makes the harness (``tests/harness``) part of every run of these tests."""

from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["tests.harness.plugin"]


@pytest.fixture
def rank(comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return this rank in a folder of its own: a relative path names another file on each rank."""
    from tests.distconv.one_rank_alone import Rank

    monkeypatch.chdir(tmp_path)
    return Rank(comm)
