"""Training loops: schedules, autocast, freezing, stopping early, accelerated and sharpened steps."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom

schedulers = torch.optim.lr_scheduler


def scheduled(b: Bench, make: Any, metric: bool = False) -> Found:
    """Four steps with a schedule; the weights, and the rates that were taken."""
    scheduler, rates = make(b.optimizer), []
    for seed in range(4):
        b.step(seed)
        with torch.no_grad():
            scheduler.step(*([b.loss(9)] if metric else []))
        rates.append(b.optimizer.param_groups[0]["lr"])
    return b.state() | {"rates": torch.tensor(rates)}


@idiom()
def the_rate_falls_along_a_cosine(b: Bench) -> Found:
    return scheduled(b, lambda o: schedulers.CosineAnnealingLR(o, 4))


@idiom()
def the_rate_falls_where_the_loss_stays(b: Bench) -> Found:
    return scheduled(b, lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=10.0), metric=True)


@idiom()
def the_rate_and_momentum_go_up_and_down(b: Bench) -> Found:
    return scheduled(b, lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=6))


@idiom()
def a_schedule_follows_a_warm_up(b: Bench) -> Found:
    def make(o: torch.optim.Optimizer) -> Any:
        parts = [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.5)]
        return schedulers.SequentialLR(o, parts, [2])

    return scheduled(b, make)


@idiom()
def groups_have_rates_of_their_own(b: Bench) -> Found:
    """No decay for norms and biases, smaller rates for early layers, warm-up by hand."""
    groups: dict[tuple[float, float], list[torch.Tensor]] = defaultdict(list)
    for name, p in b.model.named_parameters():
        groups[0.0 if p.ndim <= 1 or name.endswith(".bias") else 0.1, 0.5 if name.startswith("first") else 1.0].append(
            p
        )
    b.optimizer = torch.optim.AdamW(
        [{"params": ps, "weight_decay": d, "scale": s} for (d, s), ps in groups.items()], 1e-2
    )
    for seed in range(3):
        for group in b.optimizer.param_groups:
            group["lr"] = 1e-2 * group["scale"] * min(1.0, (seed + 1) / 2)
        b.step(seed)
    return b.state()


@idiom()
def torch_is_asked_for_deterministic_algorithms(b: Bench) -> Found:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        b.step()
    finally:
        torch.use_deterministic_algorithms(False)
    return b.state()


# -- half precision ---------------------------------------------------------------------------------------------------


@idiom()
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


@idiom()
def losses_are_scaled(b: Bench) -> Found:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for seed in range(4):
        b.optimizer.zero_grad()
        scaler.scale(b.loss(seed) * (float("inf") if seed == 1 else 1)).backward()
        scaler.unscale_(b.optimizer)
        norm = nn.utils.clip_grad_norm_(b.model.parameters(), 1.0)
        scaler.step(b.optimizer)
        scaler.update()
    return b.state() | {"scale": scaler.get_scale(), "norm": norm}
