"""Which tests the short run, the full run, and each of the jobs that share one have."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from pathlib import Path

import pytest

TURNS = (2, 3, 3, 4, 3, 3, 3, 3, 4, 3, 3, 2, 3, 3, 1, 3, 3, 2, 3)
"""Rank counts that cases are run on, by a hash of their names; on 3, which divides least, most of them."""

FEW = 4
"""Number of cases of each test on ranks in the short run, evenly spaced from the first to the last. Serial tests, which
take less time, have all of their cases there."""

MANY = {6: 0, 8: 1}
"""Rank counts on which only a share of the files (which one) is imported, which takes all of these ranks seconds: of
each of their tests the first case runs there, and whatever names the rank count."""

MANY_PARTS = 12


def share(items: list[pytest.Item], ranks: int, which: str) -> list[pytest.Item]:
    """Return the items of a run of everything on ``ranks`` ranks (0: without ``mpiexec``, with the share of 1 rank).

    ``which`` is ``"short"``, ``"rest"`` (what the short run leaves out) or ``"full"`` (both).
    """
    mine = thin(items, ranks or 1)
    if not ranks:
        on_ranks = {id(item) for item in items if is_on_ranks(item)}
        mine = [item for item in items if id(item) not in on_ranks] + [item for item in mine if id(item) in on_ranks]
    if which == "full":
        return mine
    short = set(map(id, _short(items, ranks)))
    return [item for item in mine if (id(item) in short) == (which == "short")]


def _short(items: Iterable[pytest.Item], ranks: int) -> list[pytest.Item]:
    """Return cases of each test that is not marked ``long`` and starts no jobs; none on 6 and 8 ranks."""
    return [
        case
        for cases in by_test(items).values()
        for case in (_spread(cases, FEW) if is_on_ranks(cases[0]) else cases)
        if ranks not in MANY and case.get_closest_marker("long") is None and not starts_jobs(case)
    ]


def _spread(cases: list[pytest.Item], most: int) -> list[pytest.Item]:
    """Return ``most`` of them, evenly from the first to the last."""
    chosen = min(most, len(cases))
    return [cases[i * (len(cases) - 1) // max(1, chosen - 1)] for i in range(chosen)]


def thin(items: list[pytest.Item], ranks: int) -> list[pytest.Item]:
    """Return the cases that run on ``ranks`` ranks, of tests that name no rank counts.

    Each case runs on one of the rank counts that its marker allows. On many ranks, the first case of each test in some
    files runs.
    """
    if ranks in MANY:
        cases = by_test(item for item in items if in_part(item.path, MANY[ranks], MANY_PARTS))
        turns = {id(first) for first, *_ in cases.values()}
    else:
        turns = {id(item) for item in items if _has_turn(item, ranks)}
    return [item for item in items if id(item) in turns or _named(item)]


def _named(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("ranks")
    return mark is not None and bool(mark.args)


def _has_turn(item: pytest.Item, ranks: int) -> bool:
    mark = item.get_closest_marker("ranks")
    turns = [count for count in TURNS if mark is None or runs_on(mark, count)]
    return bool(turns) and turns[zlib.crc32(item.nodeid.encode()) % len(turns)] == ranks


def runs_on(mark: pytest.Mark, size: int) -> bool:
    """Return True if a test with this ``ranks`` marker runs on ``size`` ranks.

    >>> runs_on(pytest.mark.ranks(2, 4).mark, 4), runs_on(pytest.mark.ranks(at_least=2).mark, 1)
    (True, False)
    """
    low, high = mark.kwargs.get("at_least") or 1, mark.kwargs.get("at_most") or size
    named = not mark.args or any(count(size) if callable(count) else count == size for count in mark.args)
    return named and low <= size <= high


def in_part(path: Path, index: int, parts: int) -> bool:
    """Return True if the tests of this file belong to part ``index``."""
    return zlib.crc32(path.name.encode()) % parts == index


FOR_RANKS = re.compile(r"\b(comm|shared_tmp_path|users_folder|planned_files)\b|mark\.ranks")
"""Words in files whose tests run on ranks: fixtures that start MPI, or modules that have such fixtures."""


def for_ranks(path: Path, ranks: int | None = None) -> bool:
    """Return True if a file may have tests that run on ranks. Importing other files there would take seconds.

    With ``ranks``: whether it may have tests that :func:`thin` keeps on so many.
    """
    text = path.read_text()
    found = FOR_RANKS.search(text) is not None
    if not found or ranks not in MANY:
        return found
    names = re.search(rf"ranks\(\*|\bon_ranks\b|ranks\([^)]*\b{ranks}\b", text)
    return names is not None or in_part(path, MANY[ranks], MANY_PARTS)


def by_test(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The cases of each test function."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(item.nodeid.split("[")[0], []).append(item)
    return found


def is_on_ranks(item: pytest.Item) -> bool:
    """Return True if a test runs under ``mpiexec``, on one rank or more."""
    return "comm" in getattr(item, "fixturenames", ()) or item.get_closest_marker("ranks") is not None


def starts_jobs(item: pytest.Item) -> bool:
    """Return True if a test starts jobs of its own."""
    fixtures = getattr(item, "fixturenames", ())
    return "mpiexec" in fixtures or (item.get_closest_marker("mpi") is not None and "comm" not in fixtures)
