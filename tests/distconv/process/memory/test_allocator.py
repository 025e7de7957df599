"""The allocator's settings: who wants them, and what the C library is told; this process's own is left alone."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace

import pytest

from distconv.process.memory import allocator, caching_allocators

MEGABYTE, LARGEST = 1 << 20, 2**31 - 1
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
"""As malloc.h has them."""


@pytest.fixture
def told(monkeypatch):
    """What mallopt is called with; it refuses what ``told.refused`` holds."""
    calls = []
    refused = set()

    def mallopt(name, value):
        calls.append((name, value))
        return int((name, value) not in refused)

    trimmed: list[int] = []
    libc = SimpleNamespace(mallopt=mallopt, malloc_trim=trimmed.append)
    library = SimpleNamespace(CDLL=lambda name: libc, memset=ctypes.memset)
    # Of a heap that is bounded the bound's first look trims.
    bounded = lambda give_back, *limits: SimpleNamespace(start=give_back)  # noqa: E731
    monkeypatch.setattr(allocator.bound, "Bound", bounded)
    monkeypatch.setattr(allocator, "ctypes", library)
    monkeypatch.setenv("DISTCONV_MALLOC", "1")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(allocator, "kind", "system")
    monkeypatch.setattr(caching_allocators, "loaded", lambda: None)
    os.environ.pop("THP_MEM_ALLOC_ENABLE", None)
    return SimpleNamespace(calls=calls, refused=refused, trimmed=trimmed)


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """``kernel(text)``: what the kernel says of huge pages; None: it has no such file."""

    def says(text):
        path = tmp_path / "enabled"
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(allocator, "_HUGE_PAGES", path)

    return says


@pytest.mark.parametrize(
    ("text", "there"),
    [("[always] madvise never\n", True), ("always [madvise] never\n", True), ("always madvise [never]\n", False)],
)
def test_huge_pages_are_there_unless_the_kernel_never_gives_them(kernel, text, there):
    kernel(text)
    assert allocator.huge_pages() is there


def test_a_kernel_that_does_not_know_huge_pages_has_none(kernel):
    kernel(None)
    assert not allocator.huge_pages()


@pytest.mark.parametrize(
    ("asked", "ranks", "wanted"),
    [("", 1, False), ("", 2, True), ("0", 2, False), ("1", 1, True), ("jemalloc", 1, True)],
)
def test_memory_is_kept_as_asked_for_else_with_more_than_one_rank(monkeypatch, asked, ranks, wanted):
    monkeypatch.setenv("DISTCONV_MALLOC", asked)
    assert allocator.wanted(ranks) is wanted


@pytest.fixture
def pages_cost(monkeypatch):
    """``pages_cost(mapped, of_torch)``: how many times as long a fresh block takes as a kept one."""

    def sets(mapped, of_torch=1.0):
        costs = iter([mapped, of_torch])
        monkeypatch.setattr(allocator, "fresh_over_kept", lambda block: next(costs))

    return sets


def test_one_rank_that_asked_for_nothing_tells_the_c_library_nothing(monkeypatch, told):
    monkeypatch.setattr(allocator, "wanted", lambda ranks: False)
    assert allocator.keep_memory(1) == "system"
    assert told.calls == []


def test_an_allocator_that_keeps_blocks_is_told_nothing_of_glibcs_and_bounded(monkeypatch, told):
    monkeypatch.setattr(caching_allocators, "loaded", lambda: "tcmalloc")
    given_back = []
    monkeypatch.setattr(caching_allocators, "give_back", lambda name: lambda: given_back.append(name))
    assert allocator.keep_memory(1) == "tcmalloc"
    assert told.calls == []
    assert given_back == ["tcmalloc"]
    assert allocator.describe() == "tcmalloc: freed blocks are kept, up to about 5% of what is in use and 64 MiB"


def test_an_allocator_of_the_users_own_is_left_alone_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(caching_allocators, "loaded", lambda: "jemalloc")
    monkeypatch.setattr(caching_allocators, "give_back", lambda name: pytest.fail("bounded"))
    monkeypatch.setattr(allocator, "kind", "system")
    monkeypatch.setenv("DISTCONV_MALLOC", "0")
    assert allocator.keep_memory(2) == "jemalloc"


PAGES = [(MMAP_THRESHOLD, MEGABYTE), (TRIM_THRESHOLD, LARGEST)]
HEAP = [(MMAP_THRESHOLD, LARGEST), (TRIM_THRESHOLD, LARGEST)]


def test_where_huge_pages_are_cheap_blocks_from_a_megabyte_on_are_mapped_by_themselves(kernel, told, pages_cost):
    kernel("always [madvise] never\n")
    pages_cost(2.0)
    assert allocator.keep_memory(2) == "pages"
    assert told.calls == PAGES
    assert told.trimmed == []
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"


def test_where_they_are_dear_everything_stays_in_the_heap(kernel, told, pages_cost):
    kernel("always [madvise] never\n")
    pages_cost(9.0)
    assert allocator.keep_memory(2) == "heap"
    assert told.calls == HEAP
    assert told.trimmed == [0]
    assert "THP_MEM_ALLOC_ENABLE" not in os.environ


def test_torch_that_has_not_heard_of_huge_pages_in_time_has_the_heap(kernel, told, pages_cost):
    kernel("always [madvise] never\n")
    pages_cost(2.0, of_torch=9.0)
    assert allocator.keep_memory(2) == "heap"
    assert told.calls == PAGES + HEAP


def test_a_fresh_block_takes_longer_than_a_kept_one():
    assert allocator.fresh_over_kept(allocator._mapped) > 1.0


def test_a_users_own_word_to_torch_about_huge_pages_stays(kernel, told, pages_cost):
    kernel("always [madvise] never\n")
    pages_cost(2.0)
    os.environ["THP_MEM_ALLOC_ENABLE"] = "0"
    assert allocator.keep_memory(2) == "pages"
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"


def test_without_huge_pages_nothing_is_mapped_whatever_the_library_takes(kernel, told):
    kernel(None)
    assert allocator.keep_memory(2) == "heap"
    assert told.calls == HEAP
    assert "THP_MEM_ALLOC_ENABLE" not in os.environ
    told.calls.clear()
    told.refused.add((MMAP_THRESHOLD, LARGEST))
    assert allocator.keep_memory(2) == "heap"
    assert told.calls == [(MMAP_THRESHOLD, LARGEST), (MMAP_MAX, 0), (TRIM_THRESHOLD, LARGEST)]


def test_a_library_that_refuses_or_has_no_such_settings_is_no_error(kernel, told, monkeypatch):
    kernel(None)
    told.refused |= {(MMAP_THRESHOLD, LARGEST), (MMAP_MAX, 0)}
    assert allocator.keep_memory(2) == "system"
    monkeypatch.setattr(allocator, "ctypes", SimpleNamespace(CDLL=lambda name: SimpleNamespace()))
    assert allocator.keep_memory(2) == "system"


def test_a_process_to_come_gets_the_same_settings_as_variables():
    heap, pages = allocator.environment("heap"), allocator.environment("pages")
    assert heap == {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(LARGEST)}
    assert pages == {
        "MALLOC_MMAP_THRESHOLD_": str(MEGABYTE),
        "MALLOC_TRIM_THRESHOLD_": str(LARGEST),
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    assert allocator.environment("system") == {}


def test_a_process_to_come_gets_an_allocator_that_is_installed(monkeypatch, tmp_path):
    files = {"jemalloc": ("jemalloc", tmp_path / "libjemalloc.so.2")}
    monkeypatch.setattr(caching_allocators, "installed", lambda name=None: files.get(name))
    found = allocator.environment("jemalloc")
    assert found["LD_PRELOAD"] == str(tmp_path / "libjemalloc.so.2") and "decay_ms:-1" in found["MALLOC_CONF"]
    assert allocator.environment("tcmalloc") == {}


def test_what_is_kept_by_default_may_go_back_as_the_c_library_has_it(told, kernel, monkeypatch):
    kernel("never [never]")
    assert allocator.keep_memory(2) == "heap"
    told.calls.clear()
    allocator.give_back_freed()  # DISTCONV_MALLOC=1: it was asked for
    assert (allocator.kind, told.calls) == ("heap", [])
    monkeypatch.setattr(allocator, "MALLOC", SimpleNamespace(value=lambda: None))
    allocator.give_back_freed()
    assert allocator.kind == "system"
    assert told.calls == [(MMAP_THRESHOLD, 32 * MEGABYTE), (TRIM_THRESHOLD, 64 * MEGABYTE), (MMAP_MAX, 65536)]
    told.calls.clear()
    allocator.give_back_freed()
    assert told.calls == []
