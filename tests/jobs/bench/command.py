"""Checks of the whole text that benchmarks print, with times of the test."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import distconv as dc
from distconv import cli
from distconv.jobs.bench import report
from distconv.jobs.bench.steps import torch_process, torch_step
from tests.jobs.approved import assert_approved

MACHINE = {"cpu": "a CPU", "cores": 12}


class Printing:
    """Runs benchmarks on this rank, on a machine of the test, and compares all they print."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys, self.seen = monkeypatch, capsys, list[str]()
        monkeypatch.setattr(report, "machine", lambda: MACHINE)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)

    def times(self, count: int, rounds: int) -> list[float]:
        """Seconds of a variant in no order, whose median is not its mean; ratios differ between rounds."""
        return [
            (count * 3 % 7 + 1) * (1 + ((number + count + count // 2) % rounds) ** 2 / 8) / 1000
            for number in range(rounds)
        ]

    def time_interleaved(
        self, comm: Any, variants: Mapping[Any, Callable[[], float]], rounds: int, **options: Any
    ) -> dict[Any, list[float]]:
        """Run each variant once, and return times of the test."""
        assert all(0 <= variant() < 100 for variant in variants.values())
        self.seen.append(f"timed: {', '.join(map(str, variants))}; {rounds} rounds, {options}")
        return {name: self.times(count, rounds) for count, name in enumerate(variants)}

    def replace_torch_processes(self) -> None:
        """Record how plain torch is started and what it is asked; its steps take 1, 2 and 3 ms."""

        def start(words: list[str], *, env: dict[str, str], **options: Any) -> Any:
            assert words[:2] == [sys.executable, torch_step.__file__] and options.pop("text")
            assert options == {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            chosen = {name: value for name, value in env.items() if name in ("KEPT", "LD_PRELOAD", "OMP_NUM_THREADS")}
            chosen |= {name: value for name, value in env.items() if name.startswith("MALLOC_")}
            self.seen.append(f"start {words[2:]}, {dict(sorted(chosen.items()))}")
            answers = io.StringIO("[0.003, 0.001, 0.002]\n")
            asked: list[str] = []
            stdin = SimpleNamespace(write=asked.append, flush=lambda: asked.append("flush"))

            def communicate(last: str) -> None:
                self.seen.append(f"asked {[*asked, last]}")

            return SimpleNamespace(stdin=stdin, stdout=answers, communicate=communicate)

        dc.ProcessGrid()  # the first grid of a process sets the kind of its allocator
        for name, value in {"LD_PRELOAD": "", "MALLOC_TOP_PAD_": "7", "KEPT": "yes"}.items():
            self.monkeypatch.setenv(name, value)
        self.monkeypatch.setattr(torch_process.subprocess, "Popen", start)
        self.monkeypatch.setattr(torch_process.os, "sched_getaffinity", lambda _: range(2))
        self.monkeypatch.setattr(torch_process.caching_allocators, "find_installed", lambda name: None)
        self.monkeypatch.setattr(torch_process.allocator, "kind", "heap")

    def approve(self, name: str, module: ModuleType | None, *command: str, code: int = 0) -> None:
        """Run ``distconv bench COMMAND`` whose timer is in ``module``; the text is that of the file ``bench/NAME``."""
        words = ["bench", *command]
        self.monkeypatch.setattr("sys.argv", ["distconv", *words])
        if module is not None:
            self.monkeypatch.setattr(module, "time_interleaved", self.time_interleaved)
        assert cli.main(words) == code
        self.approve_printed(name)

    def approve_printed(self, name: str) -> None:
        """Compare what was printed since the last comparison, and what was noted before."""
        assert_approved(f"bench/{name}", "\n".join([*self.seen, self.capsys.readouterr().out]))
        self.seen.clear()


@pytest.fixture
def printing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printing:
    """Benchmarks on a machine of the test."""
    return Printing(monkeypatch, capsys)
