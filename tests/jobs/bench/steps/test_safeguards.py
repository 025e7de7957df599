"""``distconv bench safeguards``: its tables and its figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from distconv import cli
from distconv.placement import COMPARED_EVERY
from tests.jobs.command_lines import assert_refused

TINY = ["--model", "mesh1k", "--width", "2", "--size", "128", "--batch", "1", "--repeats", "1"]


@pytest.mark.ranks(2)
def test_each_guard_is_timed_beside_a_step_and_each_save_beside_a_raw_file(
    comm: Any, capsys: pytest.CaptureFixture[str], shared_tmp_path: Path
) -> None:
    assert cli.main(["bench", "safeguards", *TINY, "--directory", str(shared_tmp_path)]) == 0
    comm.Barrier()
    assert not list(shared_tmp_path.iterdir())  # nothing is left on the disk
    lines = capsys.readouterr().out.splitlines()
    assert bool(lines) == (comm.rank == 0)
    if not lines:
        return
    figures = json.loads(lines[-1])
    medians = figures["median_s"]
    assert all(0 < median < math.inf for median in medians.values())
    for name, reference in (("check_replicas", "step"), ("save_checkpoint", "raw file write")):
        row = next(line for line in lines if line.startswith(f"{name} "))
        assert row.endswith(f"{medians[name] / medians[reference]:.3f}")
    off, plan = (medians[f"{COMPARED_EVERY} scatters, DISTCONV_CHECK={level}"] for level in ("off", "plan"))
    assert f"takes {(plan - off) / COMPARED_EVERY / medians['step']:.2%} of a step" in lines[-2]
    assert figures["bytes"] > 0


@pytest.mark.ranks(2)
def test_a_folder_that_is_not_there_is_one_error_on_all_ranks(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, ["bench", "safeguards", *TINY, "--directory", "/nowhere/at/all"], "/nowhere/at/all")
