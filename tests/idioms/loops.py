"""Training loops: accumulation, scaling, averages, schedules, optimizers."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

import distconv as dc
from tests.distconv.layouts import normal
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
def a_closure_accumulates(b: Bench) -> Found:
    optimizer = torch.optim.LBFGS(b.model.parameters(), 0.1, max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with b.no_sync():
            b.loss(0).backward()
        loss = b.loss(1)
        loss.backward()
        return loss

    optimizer.step(closure)
    return b.state()


@idiom
def the_rate_falls_where_the_loss_stays(b: Bench) -> Found:
    """A schedule that reads a distributed loss."""
    scheduler, rates = torch.optim.lr_scheduler.ReduceLROnPlateau(b.optimizer, patience=0, threshold=10.0), []
    for seed in range(4):
        b.step(seed)
        with torch.no_grad():
            scheduler.step(b.loss(9))
        rates.append(b.optimizer.param_groups[0]["lr"])
    return b.state() | {"rates": torch.tensor(rates)}


@idiom
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
def steps_are_sharpened(b: Bench) -> Found:
    """SAM: up along the gradient, a second pass, back and down."""
    for seed in range(2):
        b.optimizer.zero_grad()
        b.loss(seed).backward()
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in b.model.parameters()]), p=2)
        ups = []
        with torch.no_grad():
            for p in b.model.parameters():
                up = p.grad * (0.05 / (norm + 1e-12))
                p.add_(up)
                ups.append(up)
        b.optimizer.zero_grad()
        b.loss(seed).backward()
        with torch.no_grad():
            for p, up in zip(b.model.parameters(), ups, strict=True):
                p.sub_(up)
        b.optimizer.step()
    return b.state()


@idiom
def first_layers_are_frozen_and_thawed(b: Bench) -> Found:
    for name, p in b.model.named_parameters():
        p.requires_grad = not name.startswith(("first", "norm"))
    b.model.norm.eval()
    b.optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, b.model.parameters()), 1e-2)
    b.step(0)
    b.model.requires_grad_(True)
    b.optimizer.add_param_group({"params": [*b.model.first.parameters(), *b.model.norm.parameters()], "lr": 1e-3})
    b.model.train()
    b.step(1)
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
def the_best_weights_are_kept_and_loaded(b: Bench) -> Found:
    best, kept_state, waited = float("inf"), None, 0
    for seed in range(4):
        b.step(seed)
        b.model.eval()
        with torch.no_grad():
            loss = b.loss(9).item()
        b.model.train()
        if loss < best:
            best, kept_state, waited = loss, copy.deepcopy(b.model.state_dict()), 0
        else:
            waited += 1
        if waited > 2:
            break
    b.model.load_state_dict(kept_state)
    return b.state() | {"best": best}


@idiom
def only_norms_adapt_at_test_time(b: Bench) -> Found:
    """TENT: entropy minimized over the scales of norms, statistics of the batch."""
    b.model.train().requires_grad_(False)
    for m in b.model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.requires_grad_(True)
            m.track_running_stats = False
            m.running_mean = m.running_var = None
    optimizer = torch.optim.Adam([p for p in b.model.parameters() if p.requires_grad], 1e-2)
    for seed in range(2):
        y = b.model(b.images(seed))
        optimizer.zero_grad()
        (-(y.softmax(1) * y.log_softmax(1)).sum(1)).mean().backward()
        optimizer.step()
    return b.state() | {"y": y}


@idiom
def important_weights_are_held(b: Bench) -> Found:
    """Elastic weight consolidation: the diagonal of the Fisher information from squared gradients."""
    fisher = {n: torch.zeros_like(p) for n, p in b.model.named_parameters()}
    for seed in range(2):
        b.model.zero_grad()
        b.loss(seed).backward()
        for n, p in b.model.named_parameters():
            fisher[n] += p.grad.data.clone().pow(2) / 2
    old = {n: p.clone().detach() for n, p in b.model.named_parameters()}
    for seed in range(2):
        b.optimizer.zero_grad()
        held = sum((fisher[n] * (p - old[n]).pow(2)).sum() for n, p in b.model.named_parameters())
        (b.loss(seed) + 100 * held).backward()
        b.optimizer.step()
    return b.state() | {f"fisher {n}": f for n, f in fisher.items()}


@idiom
def batches_come_from_a_loader(b: Bench) -> Found:
    data = torch.utils.data.TensorDataset(normal(13, 3, 7, 9, seed=1), torch.arange(13) % 5)
    loader = torch.utils.data.DataLoader(data, 5, shuffle=True, generator=torch.Generator().manual_seed(3))
    losses = []
    for x, labels in loader:
        b.optimizer.zero_grad()
        loss = F.cross_entropy(b.model(b.place(x)), b.place(labels, "n"))
        loss.backward()
        b.optimizer.step()
        losses.append(loss.item())
    return b.state() | {"losses": torch.tensor(losses)}


@idiom
def sizes_of_inputs_change_from_step_to_step(b: Bench) -> Found:
    for seed, (rows, columns) in enumerate([(7, 9), (4, 6), (9, 5)]):
        b.optimizer.zero_grad()
        F.cross_entropy(b.model(b.place(normal(5, 3, rows, columns, seed=seed))), b.labels()).backward()
        b.optimizer.step()
    return b.state()


Rule = Callable[[Any, dict[str, Any]], None]


def stepped(b: Bench, optimizer: torch.optim.Optimizer) -> Found:
    b.optimizer = optimizer
    for seed in range(2):
        b.step(seed)
    return b.state(optimizer=True)


class Own(torch.optim.Optimizer):
    """An optimizer that changes one weight after another by ``rule(weight, its state)``."""

    def __init__(self, weights: Any, rule: Rule) -> None:
        super().__init__(weights, {})
        self.rule = rule

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.rule(p, self.state[p])


def own(b: Bench, rule: Rule, least_dims: int = 0) -> Found:
    return stepped(b, Own([p for p in b.model.parameters() if p.dim() >= least_dims], rule))


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


@idiom
def moments_are_scaled_by_layers(b: Bench) -> Found:
    """LAMB."""

    def rule(p: Any, state: dict[str, Any]) -> None:
        if not state:
            state["m"], state["v"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
        state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
        state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
        update = state["m"] / (state["v"].sqrt() + 1e-6)
        trust = (p.data.pow(2).sum().sqrt() / update.pow(2).sum().sqrt()).clamp(0, 10)
        p.data.add_(-1e-2 * trust * update)

    return own(b, rule)


@idiom
def rows_and_columns_have_second_moments(b: Bench) -> Found:
    """Adafactor by hand."""

    def rule(p: Any, state: dict[str, Any]) -> None:
        g = p.grad
        square = g**2 + 1e-30
        if not state:
            state["rows"] = torch.zeros(g.shape[:-1], dtype=g.dtype)
            state["columns"] = torch.zeros(g.shape[:-2] + g.shape[-1:], dtype=g.dtype)
        state["rows"].mul_(0.9).add_(square.mean(dim=-1), alpha=0.1)
        state["columns"].mul_(0.9).add_(square.mean(dim=-2), alpha=0.1)
        rows = (state["rows"] / state["rows"].mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        update = torch.mul(rows, state["columns"].unsqueeze(-2).rsqrt()) * g
        update.div_((update.norm(2) / (update.numel() ** 0.5)).clamp_(min=1.0))
        p.data.add_(-update, alpha=1e-2)

    return own(b, rule, 2)
