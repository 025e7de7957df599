"""Tables of Dryden et al. 2019 against relations that the paper states, and their printed form as approved."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from distconv.jobs.papers.dryden import published
from tests.jobs.approved import assert_approved


@pytest.mark.parametrize("table", published.TABLES, ids=lambda table: table.name)
def test_groups_and_samples_double_and_more_gpus_take_less_time(table: published.Table) -> None:
    assert all(b == 2 * a for a, b in itertools.pairwise(table.groups))
    samples = list(table.times_s)
    assert all(b == 2 * a for a, b in itertools.pairwise(samples))
    for times in table.times_s.values():
        assert list(times) == sorted(times, reverse=True)


def test_published_numbers_are_as_approved() -> None:
    lines = []
    for name, value in vars(published).items():
        if name.isupper():
            lines += [f"{name}: {each}" for each in (value if isinstance(value, tuple) else (value,))]
    assert any(dataclasses.is_dataclass(value) for value in vars(published).values())
    assert_approved("dryden-published", "\n".join(lines))
