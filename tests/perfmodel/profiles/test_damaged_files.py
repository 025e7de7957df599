"""A damaged layer profile file, or something else at its path, is one error with the path on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distconv.perfmodel.profiles.layer_profile import Profile
from tests.distconv.damaged_files import STATES, check_rejected

pytestmark = [pytest.mark.ranks(1, 2), pytest.mark.time_limit(20)]


@pytest.mark.parametrize("state", STATES)
def test_what_is_no_such_file_is_rejected(comm: Any, shared_tmp_path: Path, state: str) -> None:
    check_rejected(comm, shared_tmp_path / "p.json", state, lambda path, comm: Profile.load(path))
