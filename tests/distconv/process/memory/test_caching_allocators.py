"""Which allocators are found, and which one a process has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from distconv.process.memory import caching_allocators
from distconv.process.memory.caching_allocators import FILES, find_installed, loaded_allocator


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder where allocators are looked for."""
    monkeypatch.setattr(caching_allocators, "SYSTEM", (str(tmp_path),))
    monkeypatch.setattr(sys, "prefix", "/nowhere")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return tmp_path


def test_the_best_that_is_installed_is_found_or_that_which_is_named(folder: Path, monkeypatch: Any) -> None:
    assert find_installed() is None and find_installed("jemalloc") is None
    for file in ("libjemalloc.so.2", "libtcmalloc.so.4"):
        (folder / file).touch()
    assert find_installed() == ("tcmalloc", folder / "libtcmalloc.so.4")
    assert find_installed("jemalloc") == ("jemalloc", folder / "libjemalloc.so.2")
    assert find_installed("mimalloc") is None
    elsewhere = folder / "module"
    elsewhere.mkdir()
    (elsewhere / "libtcmalloc.so.4").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{elsewhere}")
    assert find_installed() == ("tcmalloc", elsewhere / "libtcmalloc.so.4")


@pytest.mark.parametrize("name", FILES)
def test_what_a_process_has_is_read_from_its_maps(tmp_path: Path, name: str) -> None:
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 00000000 08:01 12  /opt/lib/{FILES[name][0]}\n")
    assert loaded_allocator(maps) == name
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 12  /usr/lib/libtbbmalloc.so.2\n")
    assert loaded_allocator(maps) is None
    assert loaded_allocator(tmp_path / "none") is None
