"""Code blocks of the pages: Python is run on 2 ranks, a page in one namespace; files are read by what takes them."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import distconv as dc
from distconv.cli import Parser
from distconv.jobs.training.options import add_training_arguments
from distconv.jobs.training.settings import TrainingSettings
from distconv.perfmodel import Machine
from distconv.pipeline import PipelinePlan
from tests.docs.blocks import PAGES, Block, blocks

ALL = [block for page in PAGES for block in blocks(page)]
PYTHON = ("python", "pycon")
MARKERS = {"python": {"", "third-party"}, "pycon": {"", "third-party"}, "bash": {"", "cluster"}}
"""Words behind a language; all other languages have none."""

CONSOLE = {str(block.page) for block in ALL if block.language == "console"} | {"docs/tutorials/segmentation-3d.md"}
"""Pages whose commands run their files: test_console.py."""


def pages_with(marker: str) -> list[str]:
    return sorted({str(block.page) for block in ALL if block.language in PYTHON and block.marker == marker})


def run(page: str, marker: str, comm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    before, namespace = set(sys.modules), {"__name__": "page"}
    try:
        for block in blocks(Path(page)):
            if block.language in PYTHON and block.marker == marker and not (block.file and page in CONSOLE):
                comm.Barrier()
                importlib.invalidate_caches()
                block.run(namespace, folder, comm.rank)
    finally:
        for name in set(sys.modules) - before:
            if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.parametrize("page", pages_with(""))
def test_the_python_of_a_page_runs_on_2_ranks(comm, fallback, shared_tmp_path, monkeypatch, page):
    run(page, "", comm, shared_tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.time_limit(300)
@pytest.mark.filterwarnings("ignore:monai:FutureWarning")
@pytest.mark.parametrize("page", pages_with("third-party"))
def test_what_needs_networks_of_other_packages_runs_on_2_ranks(comm, fallback, shared_tmp_path, monkeypatch, page):
    monai = pytest.importorskip("monai", reason="needs the package monai")
    try:
        run(page, "third-party", comm, shared_tmp_path, monkeypatch)
    finally:
        monai.data.set_track_meta(True)


def test_a_block_has_a_language_that_is_run_or_read():
    assert {block.language for block in ALL} <= {*PYTHON, "bash", "console", "json", "yaml", "text", "diff"}
    wrong = [block for block in ALL if block.marker not in MARKERS.get(block.language, {""})]
    assert not wrong


def test_what_needs_a_cluster_is_on_the_list_and_is_a_shell_script():
    found = [block for block in ALL if block.marker == "cluster"]
    pages = {f"docs/{name}.md" for name in ("how-to/clusters", "tutorials/cluster-job", "tutorials/first-model")}
    assert {str(block.page) for block in found} == pages
    for block in found:
        if "#SBATCH" in block.text:  # jobs return to the queue with their output
            options = set(re.findall(r"^#SBATCH (\S+)$", block.text, re.M))
            assert {"--requeue", "--open-mode=append"} <= options
            # A script without a handler would be ended by the signal: only those that requeue themselves request it.
            assert ("--signal=USR1@300" in options) == ("scontrol requeue" in block.text)
            assert "srun --mpi=" in block.text


def test_a_shell_reads_its_blocks():
    for block in ALL:
        if block.language == "bash":
            read = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
            assert read.returncode == 0, (block, read.stderr)


FILES = [block for block in ALL if block.language in ("json", "yaml")]


@pytest.mark.parametrize("block", FILES, ids=[f"{block.page}:{block.line}" for block in FILES])
def test_a_file_is_one_that_is_taken(block: Block, tmp_path: Path):
    path = tmp_path / f"file.{block.language}"
    path.write_text(block.text)
    if block.language == "yaml" and "optimizer:" in block.text:  # options of a training
        parser = Parser(prog="distconv train", allow_abbrev=False)
        add_training_arguments(parser, TrainingSettings(), out="runs/x")
        assert parser.parse_args(["--config", str(path)]).optimizer == "AdamW"
    elif block.language == "yaml":
        assert Machine.load(str(path)).ranks_per_node > 0
    elif '"distconv-pipeline-plan"' in block.text:
        assert PipelinePlan.load(path).ranks > 0
    else:
        assert dc.Plan.load(path).layers
