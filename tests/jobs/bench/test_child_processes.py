"""Processes of their own: what they take, and that they are no ranks."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distconv.errors import DistconvError
from distconv.jobs.bench.child_processes import MIB, Peak, measure_first_step, run_in_new_process


def test_the_peak_of_a_first_step_counts_what_is_made_for_it() -> None:
    found = measure_first_step(lambda: torch.ones(32 * MIB // 4).sum)
    assert 30 * MIB < found.used < 60 * MIB and found.step_s > 0


def test_a_process_of_its_own_knows_nothing_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def run(command: list[str], env: dict[str, str], **_: Any) -> Any:
        given.update(env, words=command[-2:])
        return SimpleNamespace(returncode=0, stdout='a line\n{"before": 1, "peak": 5, "step_s": 0.5}\n')

    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.setattr(subprocess, "run", run)
    assert run_in_new_process(["memory", "--alone"]) == Peak(1, 5, 0.5)
    assert given["words"] == ["memory", "--alone"] and given["KEPT"] == "yes" and int(given["OMP_NUM_THREADS"]) > 0
    assert not {"PMI_RANK", "OMPI_COMM_WORLD_SIZE"} & set(given)


def test_a_process_that_fails_is_an_error_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=7, stderr="first\nlast\n"))
    with pytest.raises(DistconvError, match=r"failed \(exit code 7\): last"):
        run_in_new_process(["memory"])
