"""The allocator's settings: who wants them, and what the C library is told; this process's own is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from distconv.process.launchers import environment_without_launcher
from distconv.process.memory import allocator, caching_allocators

MEGABYTE = 1 << 20
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""As malloc.h has them."""


@pytest.fixture
def told(monkeypatch):
    """Return the recorded calls of mallopt, which rejects the options in ``told.refused``."""
    calls = []
    refused = set()

    def mallopt(name, value):
        calls.append((name, value))
        return int((name, value) not in refused)

    libc = SimpleNamespace(mallopt=mallopt)
    monkeypatch.setattr(allocator, "ctypes", SimpleNamespace(CDLL=lambda name: libc))
    monkeypatch.setenv("DISTCONV_MALLOC", "1")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(allocator, "kind", "system")
    monkeypatch.setattr(caching_allocators, "loaded_allocator", lambda: None)
    os.environ.pop("THP_MEM_ALLOC_ENABLE", None)
    return SimpleNamespace(calls=calls, refused=refused)


@pytest.mark.parametrize(
    ("asked", "ranks", "wanted"),
    [("", 1, False), ("", 2, True), ("0", 2, False), ("1", 1, True), ("jemalloc", 1, True)],
)
def test_memory_is_kept_as_asked_for_else_with_more_than_one_rank(monkeypatch, asked, ranks, wanted):
    monkeypatch.setenv("DISTCONV_MALLOC", asked)
    assert allocator.keeps_memory(ranks) is wanted


def test_one_rank_that_asked_for_nothing_tells_the_c_library_nothing(monkeypatch, told):
    monkeypatch.setattr(allocator, "keeps_memory", lambda ranks: False)
    assert allocator.keep_memory(1) == "system"
    assert told.calls == []


def test_beside_an_allocator_that_keeps_blocks_glibc_is_left_alone(monkeypatch, told):
    monkeypatch.setattr(caching_allocators, "loaded_allocator", lambda: "tcmalloc")
    assert allocator.keep_memory(2) == "tcmalloc"
    assert told.calls == []
    assert allocator.describe() == "tcmalloc: freed blocks are kept for about a second"


SIZES = [(MMAP_THRESHOLD, 32 * MEGABYTE), (TRIM_THRESHOLD, 256 * MEGABYTE)]


def test_glibc_keeps_more_free_memory_and_maps_large_blocks(told):
    assert allocator.keep_memory(2) == "heap"
    assert told.calls == SIZES
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"


def test_a_c_library_that_takes_no_settings_is_left_as_it_is(told, monkeypatch):
    told.refused.update(SIZES)
    assert allocator.keep_memory(2) == "system"
    monkeypatch.setattr(allocator, "ctypes", SimpleNamespace(CDLL=lambda name: SimpleNamespace()))
    assert allocator.keep_memory(2) == "system"


def test_a_process_to_come_gets_the_same_by_its_environment():
    heap = allocator.environment("heap")
    assert heap["MALLOC_MMAP_THRESHOLD_"] == str(32 * MEGABYTE)
    assert heap["MALLOC_TRIM_THRESHOLD_"] == str(256 * MEGABYTE)
    assert allocator.environment("system") == {}


def test_a_process_to_come_gets_an_allocator_that_is_installed(monkeypatch, tmp_path):
    files = {"jemalloc": ("jemalloc", tmp_path / "libjemalloc.so.2")}
    monkeypatch.setattr(caching_allocators, "find_installed", lambda name=None: files.get(name))
    found = allocator.environment("jemalloc")
    assert found == {"LD_PRELOAD": str(tmp_path / "libjemalloc.so.2"), **caching_allocators.SETTINGS["jemalloc"]}
    assert allocator.environment("tcmalloc") == {}


TRAINING = """
import resource, sys, threading
import torch
import distconv as dc
from mpi4py import MPI
from distconv.process.memory import allocator
grid = dc.ProcessGrid(n=1)
torch.manual_seed(0)
x = torch.ones(1)
for step in range(60):  # blocks of changing sizes, a third of which stay for a while
    kept = [torch.ones(100_000 + 37_000 * ((step * 7 + k) % 11)) for k in range(60)]
    x = x + kept[step % 60].sum()
    del kept[::3]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, sorted(t.name for t in threading.enumerate()))
"""


@pytest.mark.long
@pytest.mark.fault(107)
@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_what_is_kept_takes_at_most_a_tenth_more_than_malloc_left_alone():
    root = str(Path(__file__).resolve().parents[4])
    peaks = {}
    for asked in ("0", "1"):
        env = {**environment_without_launcher(), "PYTHONPATH": root, "DISTCONV_MALLOC": asked, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run([sys.executable, "-c", TRAINING], capture_output=True, text=True, timeout=60, env=env)
        assert ended.returncode == 0, ended.stderr
        peak, _, threads = ended.stdout.partition(" ")
        peaks[asked] = int(peak)
        assert "heap" not in threads
    assert peaks["1"] <= 1.1 * peaks["0"] + 16
