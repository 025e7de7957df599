"""Which tests a quick run, a run of everything, and each of the jobs that share one do without."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

LONG = frozenset((Path(__file__).parent / "long_tests.txt").read_text().split())
"""Names of tests that take more than a second, wherever they are."""

THINNED = (1, 4, 6, 8)
"""Rank counts that share the cases of a test among them: on 2 and 3 ranks each case runs anyway."""


def quick(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The first case of each test, without tests that are long or start jobs of their own."""
    return [
        cases[0]
        for test, cases in by_test(items).items()
        if test.split("::")[-1] not in LONG and not starts_jobs(cases[0])
    ]


def thin(items: list[pytest.Item], ranks: int) -> list[pytest.Item]:
    """Of tests with several cases and no rank counts of their own, on 1, 4, 6 and 8 ranks every fourth case.

    Each case is run on one of the four, and on all other rank counts.
    """
    if ranks not in THINNED:
        return items
    left_out = {
        case
        for cases in by_test(items).values()
        if len(cases) >= len(THINNED) and not cases[0].get_closest_marker("ranks")
        for number, case in enumerate(cases)
        if number % len(THINNED) != THINNED.index(ranks)
    }
    return [item for item in items if item not in left_out]


def part(items: list[pytest.Item], index: int, parts: int) -> list[pytest.Item]:
    """Every ``parts``-th file's tests, from file ``index`` on."""
    files = list(dict.fromkeys(item.path for item in items))
    kept = set(files[index::parts])
    return [item for item in items if item.path in kept]


def by_test(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The cases of each test function."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(item.nodeid.split("[")[0], []).append(item)
    return found


def starts_jobs(item: pytest.Item) -> bool:
    """Whether a test starts jobs of its own."""
    fixtures = getattr(item, "fixturenames", ())
    return "mpiexec" in fixtures or (item.get_closest_marker("mpi") is not None and "comm" not in fixtures)
