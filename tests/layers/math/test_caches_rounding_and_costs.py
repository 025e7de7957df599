"""Caches, rounding and cost of arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distconv.layouts import normal
from tests.layers.cache_keys import check_cache_keys
from tests.layers.costs import WHOLE, C, Cost, N, W, check_bytes, check_saved_tensors
from tests.layers.rounding import check_rounded_once, with_exact_operands

WEIGHTS = {1: normal(2, 4, 3, 3)}

OPERATORS: dict[str, list[Callable[[Any], Any]]] = {
    "reductions": [
        lambda x: x.std(1),
        lambda x: torch.std(x, True),
        lambda x: torch.std(x, False),
        lambda x: x.sum(2),
        lambda x: x.sum(2, True),
        lambda x: x.sum((2, 3)),
        lambda x: x.amax(2),
    ],
    "products": [
        lambda x: torch.einsum("nchw,kc->nkhw", x, WEIGHTS[1][:, :, 0, 0]),
        lambda x: torch.einsum("nchw,kc->nkwh", x, WEIGHTS[1][:, :, 0, 0]),
        lambda x: torch.einsum("nchw,kh->nckw", x, normal(3, 7)),
        lambda x: x @ normal(9, 2),
        lambda x: x.transpose(2, 3) @ normal(7, 2),
    ],
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OPERATORS)
def test_calls_that_differ_in_one_thing_are_not_mixed_up(comm: Any, name: str) -> None:
    check_cache_keys(comm, OPERATORS[name])


ONCE: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum((1, 2, 3)),
    "mean": torch.mean,
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1),
    "norm 2": torch.norm,
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3, (1, 2, 3)),
    "norm 0": lambda x: torch.linalg.vector_norm(x, 0, 1),
    "norm -1": lambda x: torch.linalg.vector_norm(x, -1, (2, 3)),
    "Frobenius norm": lambda x: torch.linalg.matrix_norm(x),
    "std": torch.std,
    "var": lambda x: x.var((1, 2), correction=0),
    "logsumexp": lambda x: x.logsumexp((1, 2)),
    "softmax": lambda x: x.softmax(1),
    "softmax of rows": lambda x: x.softmax(2),
    "log_softmax": lambda x: x.log_softmax(3),
    "product": with_exact_operands(lambda x, w: torch.einsum("nchw,kc->nkhw", x, w), normal(4, 6)),
}
ROUNDED_ON_EACH_RANK = ("product",)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ONCE)
def test_results_and_gradients_are_rounded_once(comm: Any, name: str) -> None:
    check_rounded_once(comm, ONCE[name], 1 + 2 * (name in ROUNDED_ON_EACH_RANK), name not in ("norm 0", "norm -1"))


COSTS: dict[str, Cost] = {
    "element by element": (lambda x: (x * 2 + x).relu().sigmoid(), lambda p: 0, 0),
    "in place": (lambda x: x.clone().mul_(2).add_(x), lambda p: 0, 0),
    "rows of all columns": (lambda x: x.sum(3), lambda p: 0, 0),
    "sum": (torch.sum, lambda p: 0, 8),
    "sum of columns": (lambda x: x.sum(2), lambda p: 0, N * C * W * 8),
    "product that is larger than x": (lambda x: normal(2, 1, 14, 12) @ x, lambda p: (p - 1) * WHOLE, 0),
    "product of the size of x": (lambda x: normal(2, 1, 12, 12) @ x, lambda p: 0, WHOLE),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", COSTS)
def test_bytes_that_are_sent_and_summed(comm: Any, name: str) -> None:
    check_bytes(comm, COSTS[name])


KEPT: dict[str, tuple[Callable[[Any], Any], float]] = {
    "relu": (torch.relu, 1),
    "sigmoid": (torch.sigmoid, 1),
    "sum": (torch.sum, 0),
    "product with a number": (lambda x: x * 2, 0),
    "softmax": (lambda x: x.softmax(1), 1),
    "softmax of rows": (lambda x: x.softmax(2), 1),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", KEPT)
def test_what_autograd_keeps(comm: Any, name: str) -> None:
    check_saved_tensors(comm, *KEPT[name])
