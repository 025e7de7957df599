"""Holes in a heap that keeps freed memory go back to the kernel; what each step frees and takes again stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distconv.process.memory import bound
from distconv.process.memory.bound import FORGET_S, HEAP, Bound

MIB = 1 << 20
SLACK, FREE_BYTES = HEAP


class Process:
    """Stands for this one: what is in use, and what is free and not given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used, self.free, self.given_back, self.now = 1000 * MIB, 0, 0, 0.0
        monkeypatch.setattr(Bound, "_resident", lambda _: self.used + self.free)
        monkeypatch.setattr(bound.time, "monotonic", lambda: self.now)
        self.bound = Bound(self.give_back, *HEAP)
        self.bound.look()

    def give_back(self) -> None:
        self.free = 0
        self.given_back += 1


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


def test_steps_that_free_and_take_the_same_are_left_alone(process: Process) -> None:
    before = process.given_back
    for _ in range(5):
        process.used, process.free = 200 * MIB, 800 * MIB
        process.bound.look()
        process.used, process.free = 1000 * MIB, 0
        process.bound.look()
    assert process.given_back == before


def test_holes_beyond_what_was_in_use_at_most_are_given_back(process: Process) -> None:
    allowed = int(1000 * MIB * (SLACK - 1)) + FREE_BYTES
    before = process.given_back
    process.free = allowed - MIB
    process.bound.look()
    assert (process.free, process.given_back) == (allowed - MIB, before)
    process.free = allowed + MIB
    process.bound.look()
    assert (process.free, process.given_back) == (0, before + 1)


def test_a_process_that_grows_is_trimmed_seldom(process: Process) -> None:
    before = process.given_back
    for _ in range(1000):
        process.used += 4 * MIB
        process.bound.look()
    assert process.given_back - before < 17  # 5 times as much, by 10 % each time


def test_a_network_that_was_dropped_is_forgotten(process: Process) -> None:
    process.used, process.free = 300 * MIB, 700 * MIB
    process.now = FORGET_S + 1
    process.bound.look()
    assert process.free == 0


# Blocks of 8 MiB, every other one of which is freed: holes that no larger block fits in.
HOLES = """
import sys, time, torch, distconv
from distconv.process.memory import allocator
assert allocator.keep_memory(2) in ("heap", "pages")
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
before = resident()
blocks = [torch.ones(1 << 21) for _ in range(128)]
del blocks[::2]
larger = [torch.ones(3 << 20) for _ in range(42)]
time.sleep(0.5)
print(allocator.kind, resident() - before)
"""


@pytest.mark.fault(107)
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_a_heap_with_holes_holds_little_more_than_what_is_in_use() -> None:
    code = subprocess.run(
        [sys.executable, "-c", HOLES],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[4]), "DISTCONV_MALLOC": "1"},
    )
    assert code.returncode == 0, code.stderr
    in_use = 64 * 8 + 42 * 12
    # Less what choosing the allocator has left free: blocks of 4 MiB were timed.
    assert in_use - 4 * 8 <= int(code.stdout.split()[1]) < SLACK * in_use + FREE_BYTES // MIB + 64
