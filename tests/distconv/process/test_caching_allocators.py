"""Which allocators are found, and that a command starts with one: a library that does nothing stands for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distconv.process import caching_allocators
from distconv.process.caching_allocators import FILES, installed, loaded
from distconv.process.command_start import is_command

ROOT = Path(__file__).resolve().parents[3]
linux = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")

SCRIPT = """\
import os, sys
print("given", sys.argv[1:], __name__)
print("inherited", [each for each in os.environ.get("LD_PRELOAD", "").split() if "malloc" in each])
import distconv as dc
from distconv.process import allocator
print("kind", allocator.kind, dc.ProcessGrid)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder where allocators are looked for."""
    monkeypatch.setattr(caching_allocators, "SYSTEM", (str(tmp_path),))
    monkeypatch.setattr(sys, "prefix", "/nowhere")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return tmp_path


def test_the_best_that_is_installed_is_found_or_that_which_is_named(folder: Path, monkeypatch: Any) -> None:
    assert installed() is None and installed("jemalloc") is None
    for file in ("libjemalloc.so.2", "libtcmalloc.so.4"):
        (folder / file).touch()
    assert installed() == ("tcmalloc", folder / "libtcmalloc.so.4")
    assert installed("jemalloc") == ("jemalloc", folder / "libjemalloc.so.2")
    assert installed("mimalloc") is None
    elsewhere = folder / "module"
    elsewhere.mkdir()
    (elsewhere / "libtcmalloc.so.4").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{elsewhere}")
    assert installed() == ("tcmalloc", elsewhere / "libtcmalloc.so.4")


@pytest.mark.parametrize("name", FILES)
def test_what_a_process_has_is_read_from_its_maps(tmp_path: Path, name: str) -> None:
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 00000000 08:01 12  /opt/lib/{FILES[name][0]}\n")
    assert loaded(maps) == name
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 12  /usr/lib/libtbbmalloc.so.2\n")
    assert loaded(maps) is None
    assert loaded(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        (["/opt/bin/distconv", "info"], True),
        (["-m", "distconv", "info"], True),
        (["train.py", "distconv"], False),
        (["-m", "pytest"], False),
        (["-c", "import distconv"], False),
        ([], False),
    ],
)
def test_only_commands_of_ours_are_started_again(arguments: list[str], ours: bool) -> None:
    assert is_command(arguments) is ours


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(folder), **variables}
    command = [sys.executable, "-m", "distconv", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def harmless_library() -> str:
    """One that every process has loaded anyway."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(path for line in lines if Path(path := line.split()[-1]).name.startswith("libm.so"))


@linux
@pytest.mark.mpi
def test_a_script_that_is_run_has_the_allocator_and_its_children_have_not(tmp_path: Path) -> None:
    shutil.copy(harmless_library(), tmp_path / "libjemalloc.so.2")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = run(tmp_path, "run", str(script), "--epochs", "3", DISTCONV_MALLOC="jemalloc")
    assert ended.returncode == 0, ended.stderr
    given, inherited, kind = ended.stdout.splitlines()
    assert given == "given ['--epochs', '3'] __main__"
    assert inherited == "inherited []"
    assert kind.startswith("kind jemalloc ")


@linux
@pytest.mark.mpi
def test_a_library_that_cannot_be_loaded_is_told_once_and_goes_without(tmp_path: Path) -> None:
    (tmp_path / "libjemalloc.so.2").write_text("no library")
    ended = run(tmp_path, "info", DISTCONV_MALLOC="jemalloc")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("cannot be preloaded") == 1
    assert "jemalloc: freed" not in ended.stdout
