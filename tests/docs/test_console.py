"""The console blocks of the pages: each command is run as it stands, and prints what stands below it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks
from tests.harness import launch

WITH_CONSOLE = [page for page in PAGES if any(block.language == "console" for block in blocks(page))]


def environment(folder: Path) -> dict[str, str]:
    """In which ``distconv`` is the checkout's, and ``mpiexec`` takes more ranks than cores."""
    programs = {
        "distconv": [sys.executable, "-m", "distconv"],
        "python": [sys.executable],
        "mpiexec": launch.mpiexec_command(),
    }
    folder.mkdir()
    for name, words in programs.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (folder / name).chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(launch.LAUNCHER_PREFIXES)}
    return kept | launch.ON_RANKS | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def alike(expected: str, printed: str, apart: float = 1e-2) -> bool:
    """Return True if the texts agree, except for decimal numbers, which may differ by the tolerance."""
    figure = r"\d+\.\d+"
    if re.sub(figure, "", expected) != re.sub(figure, "", printed):
        return False
    wanted = [float(found) for found in re.findall(figure, expected)]
    return [float(found) for found in re.findall(figure, printed)] == pytest.approx(wanted, rel=apart)


@pytest.mark.mpi
@pytest.mark.time_limit(300)
def test_the_commands_of_the_segmentation_tutorial_run(tmp_path: Path) -> None:
    page, folder = Path("docs/tutorials/segmentation-3d.md"), tmp_path / "work"
    variables = environment(tmp_path / "bin")
    folder.mkdir()
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(block.text)
    for block in blocks(page):
        if block.language == "bash":
            command = ["bash", "-e", "-c", block.text]
            ended = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=250)
            assert ended.returncode == 0, (block.text, ended.stderr)
    files = {path.name for path in (folder / "runs" / "ball").iterdir()}
    assert {"metrics.jsonl", "summary.json", "result.png", "config.yaml", "checkpoints"} <= files
    assert list((folder / "predicted").glob("prediction.*"))


@pytest.mark.mpi
@pytest.mark.time_limit(180)
@pytest.mark.parametrize("page", WITH_CONSOLE, ids=str)
def test_each_command_prints_what_stands_below_it(page: Path, tmp_path: Path) -> None:
    variables, folder, printed = environment(tmp_path / "bin"), tmp_path / "work", []
    folder.mkdir()
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(block.text)
    for block in blocks(page):
        if block.language != "console":
            continue
        for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.M):
            ended = subprocess.run(
                command, shell=True, cwd=folder, env=variables, capture_output=True, text=True, timeout=60
            )
            assert ended.returncode == 0, (command, ended.stderr)
            assert alike(expected, ended.stdout), f"{command}\nprinted\n{ended.stdout}instead of\n{expected}"
            printed.append(ended.stdout)
    if page.name == "first-model.md":
        assert alike(printed[2], printed[4], 2e-3), "one rank and two print the same"
