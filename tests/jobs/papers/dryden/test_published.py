"""Tables of Dryden et al. 2019 in their printed form as approved."""

from __future__ import annotations

import dataclasses

from distconv.jobs.papers.dryden import published
from tests.jobs.approved import assert_approved


def test_published_numbers_are_as_approved() -> None:
    lines = []
    for name, value in vars(published).items():
        if name.isupper():
            lines += [f"{name}: {each}" for each in (value if isinstance(value, tuple) else (value,))]
    assert any(dataclasses.is_dataclass(value) for value in vars(published).values())
    assert_approved("dryden-published", "\n".join(lines))
