"""One rank alone passes something else to calls with parameters: the same error on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.parameters.weight_files import load_weights, read_weights
from tests.distconv.one_rank_alone import Case, Rank, check, with_weight

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(20)]


def split_state(
    make: Callable[[list[torch.Tensor]], Any], *shapes: Sequence[int], **kind: Any
) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        parameters = [nn.Parameter(torch.zeros(*shape, **kind)) for shape in shapes]
        return dc.shard_optimizer(
            r.pick(torch.optim.Adam, make)(r.pick([nn.Parameter(torch.zeros(2))], parameters)), r.comm
        )

    return call


def state(**other: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight": torch.ones(2, 2), "bias": torch.ones(2), **other}


def weights(other: Callable[[], object], call: Callable[[Rank], object] | None = None) -> Callable[[Rank], object]:
    def run(r: Rank) -> object:
        torch.save(r.pick(state, other)(), "w.pt")
        return call(r) if call else read_weights(Path("w.pt"), r.comm)

    return run


PARAMETERS: dict[str, Case] = {
    "replicas: a weight": (
        lambda r: dc.check_replicas(with_weight(lambda w: r.odd and w[1].fill_(2)), r.comm),
        "1 of 2 .* no longer the same on all ranks, the first is 'weight'",
    ),
    "optimizer: kind": (split_state(torch.optim.SGD, (2,)), "shard_optimizer: ranks disagree"),
    "optimizer: kind that cannot be split": (split_state(torch.optim.LBFGS, (2,)), "LBFGS"),
    "optimizer: shape": (split_state(torch.optim.Adam, (3,)), "shard_optimizer: ranks disagree"),
    "optimizer: dtype": (split_state(torch.optim.Adam, (2,), dtype=torch.float64), "shard_optimizer: ranks disagree"),
    "optimizer: parameters": (split_state(torch.optim.Adam, (2,), (2,)), "shard_optimizer: ranks disagree"),
    "optimizer: a value": (
        lambda r: dc.shard_optimizer(torch.optim.SGD(with_weight(lambda w: r.odd and w.mul_(2)).parameters()), r.comm),
        "1 of 2 replicated parameters differ between ranks, the first is number 0",
    ),
    "weights: shape": (weights(lambda: state(weight=torch.ones(4))), "w.pt: ranks disagree"),
    "weights: dtype": (weights(lambda: state(weight=torch.ones(2, 2).view(torch.int32))), "w.pt: ranks disagree"),
    "weights: a value": (weights(lambda: state(weight=torch.full((2, 2), 2.0))), "w.pt: ranks disagree"),
    "weights: names": (weights(lambda: {"weight": torch.ones(2, 2), "other": torch.ones(2)}), "w.pt: ranks disagree"),
    "weights: an entry": (weights(lambda: {"weight": torch.ones(2, 2)}), "w.pt: ranks disagree"),
    "weights: no state_dict": (weights(lambda: [1]), r"holds list; .*\(on rank"),
    "weights: another model": (
        weights(
            state,
            lambda r: load_weights(nn.Linear(2, r.pick(2, 3)), Path("w.pt"), r.comm),
        ),
        r"the weights do not fit.*\(on rank",
    ),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(rank: Rank, name: str) -> None:
    check(rank, *PARAMETERS[name])
