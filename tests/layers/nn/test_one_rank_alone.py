"""A single rank has a value that layers reject: the same error on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.distconv.layouts import normal
from tests.distconv.one_rank_alone import Case, Rank, check

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(20)]

WHOLE, ONES = torch.arange(18).reshape(2, 9), torch.ones(2, 9, dtype=torch.int64)
WEIGHTS = normal(5, 2)


VALUES: dict[str, Case] = {
    "embedding": (lambda r: F.embedding(r.last(ONES, 5), WEIGHTS), "index out of range"),
    "cross entropy": (
        lambda r: F.cross_entropy(r.split(normal(1, 3, 9)), r.last(ONES[:1], 3)),
        "3",
    ),
    "one_hot": (lambda r: F.one_hot(r.last(ONES, 5), 5), "."),
    "max_unpool2d": (
        lambda r: F.max_unpool2d(r.split(normal(1, 1, 2, 9)), r.last(torch.arange(18).view(1, 1, 2, 9), 999), 2),
        "999",
    ),
}


@pytest.mark.cpu
@pytest.mark.fault(92)
@pytest.mark.parametrize("name", VALUES)
def test_values_that_torch_checks(rank: Rank, name: str) -> None:
    check(rank, *VALUES[name])


RANDOM = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x * 1, 0.5, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.5),
    "dropout2d": lambda x: F.dropout2d(x[:, :, None], 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "bernoulli": lambda x: torch.bernoulli(x * 0 + 0.5),
    "rand_like": lambda x: torch.rand_like(x),
    "normal_": lambda x: x.clone().normal_(),
}


@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_of_another_state(rank: Rank, name: str) -> None:
    x = rank.split(normal(2, 3, 9))
    RANDOM[name](x)
    torch.rand(rank.pick(0, 1))  # the last rank has drawn one more number
    check(rank, lambda r: RANDOM[name](x), "random")
