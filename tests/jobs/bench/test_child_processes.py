"""Processes of their own: what they take, and that they are no ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distconv.errors import DistconvError
from distconv.jobs.bench import child_processes
from distconv.jobs.bench.child_processes import MIB, Peak, measure_first_step, run_in_new_process


def test_the_peak_of_a_first_step_counts_what_is_made_for_it() -> None:
    found = measure_first_step(lambda: torch.ones(64 * MIB // 4).sum)
    assert 60 * MIB < found.used < 100 * MIB and found.step_s > 0


def test_the_peak_is_reset_before_and_after_the_construction(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each reading is the peak since the last one; the step's is measured, not that of its construction."""
    readings = iter((900, 100, 700, 300))
    monkeypatch.setattr(child_processes, "_peak_bytes_since_last", lambda: next(readings))
    clock = iter((2.0, 2.5))
    monkeypatch.setattr(child_processes, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert measure_first_step(lambda: lambda: None) == Peak(100, 300, 0.5)
    monkeypatch.undo()
    (tmp_path / "status").write_text("VmPeak: 9 kB\nVmHWM:\t  7 kB\nVmRSS: 3 kB\n")
    monkeypatch.setattr(child_processes, "Path", lambda path: tmp_path / Path(path).name)
    assert child_processes._peak_bytes_since_last() == 7 * 1024
    assert (tmp_path / "clear_refs").read_text() == "5"


def test_a_process_of_its_own_knows_nothing_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def run(command: list[str], env: dict[str, str], **options: Any) -> Any:
        given.update(env, words=command, options=options)
        return SimpleNamespace(returncode=0, stdout='a line\n{"before": 1, "peak": 5, "step_s": 0.5}\n')

    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(subprocess, "run", run)
    assert run_in_new_process(["memory", "--alone"]) == Peak(1, 5, 0.5)
    assert given["words"] == [sys.executable, "-m", "distconv", "bench", "memory", "--alone"]
    assert given["options"] == {"capture_output": True, "text": True}
    assert given["KEPT"] == "yes" and given["OMP_NUM_THREADS"] == str(torch.get_num_threads())
    assert not {"PMI_RANK", "OMPI_COMM_WORLD_SIZE"} & set(given)


def test_a_process_that_fails_is_an_error_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=7, stderr="first\nlast\n"))
    with pytest.raises(DistconvError, match=r"failed \(exit code 7\): last"):
        run_in_new_process(["memory"])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stderr=" "))
    with pytest.raises(DistconvError, match=r"failed \(exit code 1\): no message"):
        run_in_new_process(["memory"])
