"""Modules that are hooked, wrapped, tied and converted, and results as Python takes them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


@idiom
def states_and_steps_have_hooks(b: Bench) -> Found:
    def halve(optimizer: Any, args: Any, named: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    sums: list[torch.Tensor] = []
    b.optimizer.register_step_pre_hook(halve)
    b.optimizer.register_step_post_hook(lambda *_: sums.append(sum(p.detach().norm() for p in b.model.parameters())))
    b.model.register_state_dict_post_hook(lambda m, d, prefix, _: d.update(extra=d[f"{prefix}head.weight"] * 2))
    b.model.register_load_state_dict_pre_hook(lambda m, d, *_: d.pop("extra"))
    b.step()
    state = {name: t.clone() for name, t in b.model.state_dict().items()}
    b.step(1)
    b.model.load_state_dict(state)
    return b.state() | {"sums": torch.stack([s.detach() for s in sums])}


@idiom
def losses_become_pythons_numbers(b: Bench) -> Found:
    losses = [b.loss(seed) for seed in range(3)]
    count, x = b.labels().max(), b.images()
    ordered = sorted(losses)
    (ordered[0] + max(losses) + sum(losses)).backward()
    detached = [loss.detach() for loss in losses]
    return b.gradients() | {
        "mean": float(np.mean(detached)), "root": math.sqrt(detached[0]), "text": float(f"{detached[0]:.6f}"),
        "range": len(range(count)), "listed": [3, 1, 4, 1, 5][count], "rows": x[:, :, :count], "image": x[count],
        "tensor": torch.tensor(detached), "stacked": torch.stack(ordered).detach(),
    }  # fmt: skip


@idiom
def results_are_noted_in_plain_tensors(b: Bench) -> Found:
    history, queue = torch.zeros(4).double(), torch.ones(5, 3, 7, 9).double()
    history[1] = b.loss().detach()
    history[2:] = b.loss(1).detach()
    queue[:2] = b.images()[:2] * 2
    queue[b.images() > 0] = 0
    queue.masked_fill_(b.images() < -1, 3)
    sums = torch.zeros(6).double().index_add_(0, b.labels(), b.images().mean((1, 2, 3)))
    marks = torch.zeros(5, 5).double().scatter_(1, b.labels()[:, None], 1.0)
    table = torch.linspace(0, 1, 5, dtype=torch.float64)[b.labels()]
    return {"history": history, "queue": queue, "sums": sums, "marks": marks, "table": table}


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 5))
    net[2].weight = net[0].weight
    return net


@idiom
def two_layers_share_a_weight(b: Bench) -> Found:
    net = b.made(tied)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for seed in range(2):
        x = torch.cat([b.images(seed).mean((2, 3))] * 2, 1)
        optimizer.zero_grad()
        F.cross_entropy(net(x), b.labels()).backward()
        optimizer.step()
    return b.state(net)


class Centred(nn.Module):
    """Subtracts a moving average that is assigned anew at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.slope = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data = 0.9 * self.mean.data + 0.1 * x.mean((0, 2, 3))
        return (x - self.mean[None, :, None, None]) * self.slope[None, :, None, None]


@idiom
def a_moving_average_is_assigned_to_data_of_a_buffer(b: Bench) -> Found:
    layer = b.made(Centred)
    for seed in range(2):
        (layer(b.images(seed)) ** 2).mean().backward()
    return {"mean": layer.mean, "dL/dslope": layer.slope.grad}
