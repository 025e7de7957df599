"""Training loops: accumulation, scaling, averages, schedules, optimizers."""

from __future__ import annotations

import torch
from torch import nn

from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


@idiom
def scaled_losses_are_accumulated(b: Bench) -> Found:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for seed in range(2):
        with b.no_sync():
            scaler.scale(b.loss(seed) / 2).backward()
    scaler.unscale_(b.optimizer)
    scaler.step(b.optimizer)
    scaler.update()
    return b.state()


@idiom
def low_ranks_adapt_a_frozen_layer(b: Bench) -> Found:
    """LoRA around a linear layer."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base
            self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 7, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + 0.5 * self.b(self.a(x))

    b.model.requires_grad_(False)
    torch.manual_seed(8)
    adapted = Adapted(b.model.hidden)
    b.parallel(adapted.a), b.parallel(adapted.b)
    b.model.hidden = adapted
    b.optimizer = torch.optim.AdamW([p for p in b.model.parameters() if p.requires_grad], 1e-2)
    b.step(0)
    b.step(1)
    with torch.no_grad():
        adapted.base.weight += 0.5 * adapted.b.weight @ adapted.a.weight
    return b.state()


@idiom
def lbfgs_with_line_search(b: Bench) -> Found:
    optimizer = torch.optim.LBFGS(b.model.parameters(), 0.1, max_iter=3, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = b.loss()
        loss.backward()
        return loss

    optimizer.step(closure)
    return b.state()
