"""Training loops: accumulation, scaling, averages, schedules, optimizers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

import distconv as dc
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
def layers_compute_in_bfloat16(b: Bench) -> Found:
    """What is the same whatever the order of sums: the dtypes of all results and gradients."""
    found: Found = {}
    torch.manual_seed(5)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Softmax(1))
    if b.grid is not None:
        dc.parallelize(net, b.grid)

    def note(name: str, tensor: torch.Tensor) -> None:
        found[name] = torch.zeros(tensor.dim(), dtype=tensor.dtype)

    for index, module in enumerate(net):
        module.register_forward_hook(lambda m, x, y, index=index: note(str(index), y))
    with torch.autocast("cpu", torch.bfloat16):
        y = net(b.images().float())
        loss = F.mse_loss(y, torch.zeros_like(y))
    note("loss", loss)
    loss.backward()
    for name, p in net.named_parameters():
        note(f"dL/d{name}", p.grad)
    return found


@idiom
def torch_averages_models(b: Bench) -> Found:
    mean, both = AveragedModel(b.model), AveragedModel(b.model, use_buffers=True)
    for seed in range(2):
        b.step(seed)
        mean.update_parameters(b.model)
        both.update_parameters(b.model)
    update_bn([b.images(5)], mean)
    return b.state(mean) | {f"both {n}": t for n, t in b.state(both).items()}


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
