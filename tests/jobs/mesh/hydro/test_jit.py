"""Machine code that is kept on disk goes when any of the modules changes."""

from __future__ import annotations

import os
from pathlib import Path

from distconv.jobs.mesh.hydro.jit import remove_stale_cache


def test_code_older_than_a_module_is_removed(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").mkdir()
    ages = {"old.py": 1, "new.py": 5, "__pycache__/a.nbi": 4, "__pycache__/a.1.nbc": 4, "__pycache__/b.nbi": 6}
    for name, age in {**ages, "__pycache__/old.pyc": 1}.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (age, age))
    remove_stale_cache(tmp_path)
    assert sorted(path.name for path in (tmp_path / "__pycache__").iterdir()) == ["b.nbi", "old.pyc"]
