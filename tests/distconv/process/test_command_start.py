"""A command starts with an allocator, for which a library that does nothing stands; bad variables end all ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distconv.process.command_start import is_command

ROOT = Path(__file__).resolve().parents[3]
linux = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")

SCRIPT = """\
import os, sys
print("given", sys.argv[1:], __name__)
print("inherited", [each for each in os.environ.get("LD_PRELOAD", "").split() if "malloc" in each])
import distconv as dc
from distconv.process.memory import allocator
dc.ProcessGrid(n=1)
print("kind", allocator.kind, "LD_PRELOAD" in os.environ)
"""


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


def test_a_bad_value_ends_a_command_with_code_2_and_one_line(mpiexec, tmp_path):
    bad = {"PYTHONPATH": str(ROOT), "DISTCONV_CHECK": "sometimes"}
    command = tmp_path / "distconv"  # as pip writes it
    command.write_text("import sys\nfrom distconv.cli import main\nsys.exit(main())\n")
    ended = mpiexec(2, command, "info", timeout=60, env=bad)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.splitlines() == [
        "distconv info: DISTCONV_CHECK='sometimes' must be off, plan or all; default: plan"
    ]
