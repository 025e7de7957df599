"""One rank alone passes something else to save_checkpoint or load_checkpoint: the same error on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distconv as dc
from tests.distconv.one_rank_alone import Case, Rank, check, with_weight

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(20)]


def save_with_optimizer(comm: Any, of_layer: int) -> None:
    """Save two layers with an optimizer of one of them, as stages of a pipeline have; the second has a bias, too."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net[of_layer].parameters(), 0.1, momentum=0.9)
    for parameter in net[of_layer].parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    dc.save_checkpoint("a", 1, net, optimizer, comm=comm)


CHECKPOINTS: dict[str, Case] = {
    "checkpoint saved: folder": (
        lambda r: dc.save_checkpoint(r.pick("a", "b"), 1, with_weight(len), comm=r.comm),
        "sav",
    ),
    "checkpoint saved: step": (
        lambda r: dc.save_checkpoint("a", r.pick(1, 2), with_weight(len), comm=r.comm),
        "step 2 in",
    ),
    "checkpoint saved: a value of no kind": (
        lambda r: dc.save_checkpoint("a", 1, with_weight(len), comm=r.comm, values=r.pick({}, 3)),
        "values is a int",
    ),
    "checkpoint saved: parameters of the optimizer": (
        lambda r: save_with_optimizer(r.comm, of_layer=r.pick(0, 1)),
        r"rank 0, whose copies are written, lacks 2 tensors of rank \d, the first 'optimizer/1.weight/momentum_buffer'",
    ),
    "checkpoint loaded: folder": (
        lambda r: dc.load_checkpoint(r.pick("a", "b"), with_weight(len), comm=r.comm),
        "load",
    ),
    **{
        f"checkpoint loaded: {option}": (
            lambda r, o=option: dc.load_checkpoint(
                "a", with_weight(len), comm=r.comm, **r.pick({}, {o: o != "strict"})
            ),
            "load_checkpoint: ranks disagree",
        )
        for option in ("strict", "convert_dtype", "fallback", "missing_ok")
    },
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(rank: Rank, name: str) -> None:
    check(rank, *CHECKPOINTS[name])
