"""Plain values come back as they were, or are refused."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch

from distconv.checkpoint.values import NUMBER, PAIRS, TENSOR, from_json, replace_tensor_names, tensor_names, to_json


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2.5,
        "text",
        [1, [2]],
        {"a": {"b": []}},
        {},
        {1: "a", "1": "b"},
        {(0, 1): {2.5: None}},
        {None: 1},
        math.inf,
        {-math.inf: [1, -math.inf]},
    ],
)
def test_values_come_back(value: object) -> None:
    back = from_json(json.loads(json.dumps(to_json(value, "it", {}), allow_nan=False)))
    assert back == value
    assert type(back) is type(value)


def test_what_is_like_a_list_or_a_dictionary_comes_back_as_one() -> None:
    assert from_json(to_json((1, (2,)), "it", {})) == [1, [2]]
    assert from_json(to_json(Counter({30: 1}), "it", {})) == {30: 1}


@pytest.mark.parametrize("value", [{PAIRS: 1}, {NUMBER: "inf"}, {TENSOR: 1, "a": 2}, {"a": object()}, [b"x"], {1: {2}}])
def test_what_would_not_come_back_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^it.* which JSON cannot represent"):
        to_json(value, "it", {})


@pytest.mark.parametrize(
    "value", [{PAIRS: 1}, {PAIRS: [[1]]}, {PAIRS: [], "a": 1}, {PAIRS: [[{}, 1]]}, [{PAIRS: None}]]
)
def test_pairs_that_are_none_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=f"'{PAIRS}' (is not a list of pairs|holds an invalid key)"):
        from_json(value)


def test_what_is_no_number_comes_back() -> None:
    back = from_json(json.loads(json.dumps(to_json([math.nan, {"a": math.nan}], "it", {}), allow_nan=False)))
    assert math.isnan(back[0]) and math.isnan(back[1]["a"])


def test_tensors_are_taken_out_and_put_back() -> None:
    taken: dict[str, torch.Tensor] = {}
    value = {"ema": {"a": torch.ones(2), 3: [torch.zeros(()), "b"]}, "lr": torch.tensor(0.5)}
    names = from_json(json.loads(json.dumps(to_json(value, "it", taken))))
    assert sorted(tensor_names(names)) == sorted(taken) == ["values/0", "values/1", "values/2"]
    back = replace_tensor_names(names, taken)
    assert torch.equal(back["ema"]["a"], torch.ones(2)) and torch.equal(back["lr"], torch.tensor(0.5))
    assert torch.equal(back["ema"][3][0], torch.zeros(())) and back["ema"][3][1] == "b"


@pytest.mark.parametrize("value", [{NUMBER: "1"}, {NUMBER: 1}, {TENSOR: "model/x"}, [{TENSOR: 3}], {NUMBER: None}])
def test_numbers_and_tensors_that_are_none_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"'distconv/(number|tensor)' holds"):
        from_json(value)
