"""Machine code that is kept on disk goes when any of the modules changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distconv.jobs.mesh.hydro.jit import remove_stale_cache

CALLED = """
from distconv.jobs.mesh.hydro.jit import kernel
@kernel
def more(x):
    return x + {}
"""
CALLING = """
from distconv.jobs.mesh.hydro.jit import kernel
from called import more
@kernel
def most(x):
    return more(x)
"""
RUN = """
import pathlib
from distconv.jobs.mesh.hydro import jit
jit.remove_stale_cache(pathlib.Path())
import calling
print(calling.most(1.0))
"""


def test_code_older_than_a_module_is_removed(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").mkdir()
    ages = {"old.py": 1, "new.py": 5, "__pycache__/a.nbi": 4, "__pycache__/a.1.nbc": 4, "__pycache__/b.nbi": 6}
    for name, age in {**ages, "__pycache__/old.pyc": 1}.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (age, age))
    remove_stale_cache(tmp_path)
    assert sorted(path.name for path in (tmp_path / "__pycache__").iterdir()) == ["b.nbi", "old.pyc"]


@pytest.mark.long
def test_a_kernel_is_compiled_anew_when_one_that_it_calls_has_changed(tmp_path: Path) -> None:
    (tmp_path / "calling.py").write_text(CALLING)
    root = Path(__file__).parents[4]
    for number in (1, 2):
        (tmp_path / "called.py").write_text(CALLED.format(number))
        done = subprocess.run(
            [sys.executable, "-c", RUN], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout == f"{1.0 + number}\n"
