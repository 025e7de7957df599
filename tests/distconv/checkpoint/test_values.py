"""Plain values come back as they were, or are refused."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from distconv.checkpoint.values import PAIRS, from_json, to_json


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 2.5, "text", [1, [2]], {"a": {"b": []}}, {}, {1: "a", "1": "b"}, {(0, 1): {2.5: None}}, {None: 1}],
)
def test_values_come_back(value: object) -> None:
    back = from_json(json.loads(json.dumps(to_json(value, "it"))))
    assert back == value
    assert type(back) is type(value)


def test_what_is_like_a_list_or_a_dictionary_comes_back_as_one() -> None:
    assert from_json(to_json((1, (2,)), "it")) == [1, [2]]
    assert from_json(to_json(Counter({30: 1}), "it")) == {30: 1}


@pytest.mark.parametrize("value", [{PAIRS: 1}, {"a": object()}, [b"x"], float("nan"), {1: {2}}])
def test_what_would_not_come_back_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^it.* (which JSON cannot carry|for which JSON has no word)"):
        to_json(value, "it")


@pytest.mark.parametrize(
    "value", [{PAIRS: 1}, {PAIRS: [[1]]}, {PAIRS: [], "a": 1}, {PAIRS: [[{}, 1]]}, [{PAIRS: None}]]
)
def test_pairs_that_are_none_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=f"'{PAIRS}' holds"):
        from_json(value)
