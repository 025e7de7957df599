"""Caches, rounding and cost of functions that create, shape and index tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.layers.cache_keys import check_cache_keys
from tests.layers.costs import WHOLE, Cost, check_bytes, check_saved_tensors, redistribute_to, unmoved_bytes

OPERATORS: dict[str, list[Callable[[Any], Any]]] = {
    "slices": [
        lambda x: x[:, :, 1:6],
        lambda x: x[:, :, 1:5],
        lambda x: x[:, :, 1:6:2],
        lambda x: x[:, 1:3, 1:6],
        lambda x: x[:, :, :, 1:6],
    ],
    "indices": [
        lambda x: x[[0, 1]],
        lambda x: x[0, 1],
        lambda x: x[[0, 1], [1, 0]],
        lambda x: x[:, [0, 1]],
        lambda x: x[0:1],
    ],
    "shapes": [
        lambda x: x.reshape(2, 4, -1),
        lambda x: x.reshape(8, 7, 9),
        lambda x: x.reshape(2, 2, 2, 7, 9),
        lambda x: x.flatten(1),
        lambda x: x.transpose(1, 2),
        lambda x: x.transpose(2, 3),
    ],
    "joining": [
        lambda x: torch.cat([x, x[:, :, :2]], 2),
        lambda x: torch.cat([x[:, :, :2], x], 2),
        lambda x: torch.cat([x, x[:, :2]], 1),
        lambda x: torch.stack([x, x]),
        lambda x: torch.stack([x, x], 3),
    ],
    "memory": [
        lambda x: x.clone(),
        lambda x: x.clone(memory_format=torch.contiguous_format),
        lambda x: x.clone(memory_format=torch.channels_last),
        lambda x: x[:1].clone(),
        lambda x: x.float(),
        lambda x: x + x.transpose(2, 3).clone().transpose(2, 3),
    ],
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OPERATORS)
def test_calls_that_differ_in_one_thing_are_not_mixed_up(comm: Any, name: str) -> None:
    check_cache_keys(comm, OPERATORS[name])


COSTS: dict[str, Cost] = {
    "slice of columns": (lambda x: x[..., 1:4], lambda p: 0, 0),
    "slice of rows": (lambda x: x[:, :, 3:9], lambda p: 0, 0),
    "merged samples and channels": (lambda x: x.flatten(0, 1), lambda p: 0, 0),
    "transposed": (lambda x: x.transpose(2, 3), lambda p: 0, 0),
    "joined channels": (lambda x: torch.cat([x, x], 1), lambda p: 0, 0),
    "stacked": (lambda x: torch.stack([x, x]), lambda p: 0, 0),
    "layout that it has": (redistribute_to(None, None, "h", None), lambda p: 0, 0),
    "replicated": (redistribute_to(None, None, None, None), lambda p: (p - 1) * WHOLE, 0),
    "columns split": (redistribute_to(None, None, None, "h"), lambda p: WHOLE - unmoved_bytes(p), 0),
    "replicated, and split again": (
        lambda x: redistribute_to(None, None, "h", None)(redistribute_to(None, None, None, None)(x)),
        lambda p: (p - 1) * WHOLE,
        0,
    ),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", COSTS)
def test_bytes_that_are_sent_and_summed(comm: Any, name: str) -> None:
    check_bytes(comm, COSTS[name])


KEPT: dict[str, tuple[Callable[[Any], Any], float]] = {
    "slice": (lambda x: x[:, :, 3:9], 0),
    "replicated": (redistribute_to(None, None, None, None), 0),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", KEPT)
def test_what_autograd_keeps(comm: Any, name: str) -> None:
    check_saved_tensors(comm, *KEPT[name])
