"""The allocator's settings: who wants them, and what the C library is told; this process's own is left alone."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from distconv.process import allocator

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

    monkeypatch.setattr(allocator, "ctypes", SimpleNamespace(CDLL=lambda name: SimpleNamespace(mallopt=mallopt)))
    monkeypatch.setenv("DISTCONV_MALLOC", "1")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("THP_MEM_ALLOC_ENABLE", None)
    return SimpleNamespace(calls=calls, refused=refused)


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
    [("", 1, False), ("", 2, True), ("0", 2, False), ("1", 1, True)],
)
def test_memory_is_kept_as_asked_for_else_with_more_than_one_rank(monkeypatch, asked, ranks, wanted):
    monkeypatch.setenv("DISTCONV_MALLOC", asked)
    assert allocator.wanted(ranks) is wanted


def test_one_rank_that_asked_for_nothing_tells_the_c_library_nothing(monkeypatch, told):
    monkeypatch.setattr(allocator, "wanted", lambda ranks: False)
    assert not allocator.keep_memory(1)
    assert told.calls == []


def test_with_huge_pages_blocks_from_a_megabyte_on_are_mapped_by_themselves(kernel, told):
    kernel("always [madvise] never\n")
    assert allocator.keep_memory(2)
    assert told.calls == [(MMAP_THRESHOLD, MEGABYTE), (TRIM_THRESHOLD, LARGEST)]
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"


def test_a_users_own_word_to_torch_about_huge_pages_stays(kernel, told):
    kernel("always [madvise] never\n")
    os.environ["THP_MEM_ALLOC_ENABLE"] = "0"
    assert allocator.keep_memory(2)
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"


def test_without_huge_pages_nothing_is_mapped_whatever_the_library_takes(kernel, told):
    kernel(None)
    assert allocator.keep_memory(2)
    assert told.calls == [(MMAP_THRESHOLD, LARGEST), (TRIM_THRESHOLD, LARGEST)]
    assert "THP_MEM_ALLOC_ENABLE" not in os.environ
    told.calls.clear()
    told.refused.add((MMAP_THRESHOLD, LARGEST))
    assert allocator.keep_memory(2)
    assert told.calls == [(MMAP_THRESHOLD, LARGEST), (MMAP_MAX, 0), (TRIM_THRESHOLD, LARGEST)]


def test_a_library_that_refuses_or_has_no_such_settings_is_no_error(kernel, told, monkeypatch):
    kernel("always [madvise] never\n")
    told.refused.add((MMAP_THRESHOLD, MEGABYTE))
    assert not allocator.keep_memory(2)
    monkeypatch.setattr(allocator, "ctypes", SimpleNamespace(CDLL=lambda name: SimpleNamespace()))
    assert not allocator.keep_memory(2)


@pytest.mark.parametrize("text", ["always [madvise] never\n", None])
def test_a_process_to_come_gets_the_same_settings_as_variables(kernel, told, text):
    kernel(text)
    allocator.keep_memory(2)
    names = {MMAP_THRESHOLD: "MALLOC_MMAP_THRESHOLD_", TRIM_THRESHOLD: "MALLOC_TRIM_THRESHOLD_"}
    settings = {names[name]: str(value) for name, value in told.calls}
    pages = {} if text is None else {"THP_MEM_ALLOC_ENABLE": "1"}
    assert allocator.environment() == settings | pages
