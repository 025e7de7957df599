"""torch's optimizers, and people's own, which read weights and gradients as they like."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.idioms.bench import Bench, Found, kept
from tests.idioms.table import idiom

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


def matrices(b: Bench) -> list[torch.Tensor]:
    return [p for p in b.model.parameters() if p.dim() == 2]


# -- torch's ----------------------------------------------------------------------------------------------------------


@idiom()
def sgd_with_nesterovs_momentum(b: Bench) -> Found:
    return stepped(b, torch.optim.SGD(b.model.parameters(), 0.05, momentum=0.9, nesterov=True, foreach=False))


@idiom()
def adam_with_decoupled_decay(b: Bench) -> Found:
    return stepped(b, torch.optim.AdamW(b.model.parameters(), 1e-2, weight_decay=0.1))


@idiom()
def adam_with_the_largest_second_moments(b: Bench) -> Found:
    return stepped(b, torch.optim.Adam(b.model.parameters(), 1e-2, amsgrad=True, foreach=True))


@idiom()
def fused_steps(b: Bench) -> Found:
    return stepped(b, torch.optim.Adam(b.model.parameters(), 1e-2, fused=True))


@idiom()
def rmsprop_and_adagrad(b: Bench) -> Found:
    first = stepped(b, torch.optim.RMSprop(b.model.parameters(), 1e-2, centered=True, momentum=0.9))
    return first | {f"adagrad {n}": t for n, t in stepped(b, torch.optim.Adagrad(b.model.parameters(), 1e-2)).items()}


@idiom()
def optimizers_that_few_use(b: Bench) -> Found:
    found = {}
    for kind in ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop"):
        make = getattr(torch.optim, kind)
        found |= {f"{kind} {n}": t for n, t in stepped(b, make(b.model.parameters(), 1e-3)).items()}
    return found


@idiom()
def adafactor_of_torch(b: Bench) -> Found:
    return stepped(b, torch.optim.Adafactor(b.model.parameters(), 1e-2))


@idiom()
def muon_of_torch(b: Bench) -> Found:
    return stepped(b, torch.optim.Muon(matrices(b), 1e-2))


@idiom()
def lbfgs_with_line_search(b: Bench) -> Found:
    optimizer = torch.optim.LBFGS(b.model.parameters(), 0.1, max_iter=3, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = b.loss()
        loss.backward()
        return loss

    optimizer.step(closure)
    return b.state()


@idiom()
def what_an_optimizer_keeps_is_saved_and_loaded(b: Bench) -> Found:
    b.optimizer = torch.optim.Adam(b.model.parameters(), 1e-2)
    b.step(0)
    saved = b.optimizer.state_dict()
    b.optimizer = torch.optim.Adam(b.model.parameters(), 1e-2)
    b.optimizer.load_state_dict(saved)
    b.step(1)
    return b.state(optimizer=True)


# -- people's own -----------------------------------------------------------------------------------------------------


@idiom()
def layers_are_scaled_by_norms_read_as_data(b: Bench) -> Found:
    """LARS."""

    def rule(p: Any, state: dict[str, Any]) -> None:
        w, g = p.data.norm(), p.grad.data.norm()
        p.data.add_(p.grad.data, alpha=-float(0.01 * w / (g + 1e-9)))

    return own(b, rule)


@idiom()
def layers_are_scaled_by_norms_as_tensors(b: Bench) -> Found:
    def rule(p: Any, state: dict[str, Any]) -> None:
        w, g = torch.norm(p), torch.norm(p.grad)
        one = torch.ones_like(w)
        p.add_(p.grad * torch.where(w > 0, torch.where(g > 0, 0.01 * w / g, one), one), alpha=-1)

    return own(b, rule)


@idiom()
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


@idiom(quick=True)
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


@idiom()
def updates_are_made_orthogonal_by_iteration(b: Bench) -> Found:
    """Muon by hand: Newton-Schulz."""

    def rule(p: Any, state: dict[str, Any]) -> None:
        x = p.grad.reshape(len(p.grad), -1)
        x = x / (x.norm() + 1e-7)
        turned = x.size(0) > x.size(1)
        x = x.T if turned else x
        for _ in range(3):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        p.add_((x.T if turned else x).reshape(p.shape), alpha=-1e-2)

    return own(b, rule, 2)


@idiom()
def updates_are_made_orthogonal_by_singular_values(b: Bench) -> Found:
    def rule(p: Any, state: dict[str, Any]) -> None:
        u, _, v = torch.linalg.svd(p.grad.flatten(1), full_matrices=False)
        p.add_((u @ v).view(p.shape), alpha=-1e-2)

    # The bias-like head matrices have rank enough; gradients of rank below that have no one answer.
    return stepped(b, Own([b.model.first.weight, b.model.second.weight], rule))


@idiom()
def gradients_are_preconditioned(b: Bench) -> Found:
    """Shampoo."""

    def rule(p: Any, state: dict[str, Any]) -> None:
        g = p.grad.view(p.shape[0], -1)
        if "left" not in state:
            state["left"] = torch.eye(g.shape[0], dtype=g.dtype) * 1e-2
        state["left"].add_(g @ g.t())
        values, vectors = torch.linalg.eigh(state["left"])
        p.data.add_((vectors @ (values.pow(-0.25).diag() @ vectors.t()) @ g).view_as(p), alpha=-1e-3)

    return own(b, rule, 2)


@idiom()
def signs_of_interpolations_are_taken(b: Bench) -> Found:
    """Lion."""

    def rule(p: Any, state: dict[str, Any]) -> None:
        if not state:
            state["m"] = torch.zeros_like(p)
        p.add_(state["m"].clone().mul_(0.9).add(p.grad, alpha=0.1).sign_(), alpha=-1e-3)
        state["m"].mul_(0.99).add_(p.grad, alpha=0.01)

    return own(b, rule)


@idiom()
def a_belief_in_gradients_is_kept(b: Bench) -> Found:
    """AdaBelief with rectification, state made by sizes alone."""

    def rule(p: Any, state: dict[str, Any]) -> None:
        if not state:
            state["step"], state["m"] = 0, p.data.new(p.size()).zero_()
            state["s"] = torch.zeros(p.size()).to(p)
        state["step"] += 1
        state["m"] = 0.9 * state["m"] + 0.1 * p.grad
        apart = p.grad - state["m"]
        state["s"] += apart * apart
        p.data.addcdiv_(state["m"], state["s"].sqrt().add_(1e-3), value=-1e-2 / (1 - 0.9 ** state["step"]))

    return own(b, rule)


@idiom()
def weights_are_projected_after_a_step(b: Bench) -> Found:
    """Clipping, the largest norm of rows, weights that are not negative."""

    def rule(p: Any, state: dict[str, Any]) -> None:
        p.sub_(p.grad)
        p.data.clamp_(-0.3, 0.3)
        if p.dim() > 1:
            p.data.copy_(torch.renorm(p.data, 2, 0, 0.5))
        else:
            p.data = nn.functional.relu(p.data)

    return own(b, rule)


@idiom()
def the_largest_gradients_alone_are_applied(b: Bench) -> Found:
    def rule(p: Any, state: dict[str, Any]) -> None:
        least = p.grad.abs().flatten().topk(max(1, p.numel() // 3))[0][-1]
        p.sub_(p.grad * (p.grad.abs() >= least))
        if p.grad.abs().max() > p.grad.abs().mean() * 2:
            p.data -= 1e-2 * p.grad.sign()
        p.data.view(-1)[:2] = 0

    return own(b, rule)


@idiom()
def noise_moves_weights(b: Bench) -> Found:
    """Stochastic gradient Langevin dynamics."""

    def rule(p: Any, state: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-1e-2).add_(torch.randn_like(p), alpha=1e-3)
        p.data += torch.randn(p.shape, dtype=p.dtype) * 1e-3

    torch.manual_seed(3)
    return own(b, rule)


@idiom()
def results_go_to_given_tensors(b: Bench) -> Found:
    def rule(p: Any, state: dict[str, Any]) -> None:
        twice = torch.empty_like(p.grad)
        torch.mul(p.grad, 2, out=twice)
        torch.add(p, twice, alpha=-0.1, out=p)

    return own(b, rule)


@idiom()
def many_tensors_are_changed_at_once(b: Bench) -> Found:
    """foreach functions."""
    weights = list(b.model.parameters())
    moments = [torch.zeros_like(p) for p in weights]
    for seed in range(2):
        b.model.zero_grad()
        b.loss(seed).backward()
        with torch.no_grad():
            gradients = [p.grad for p in weights]
            torch._foreach_mul_(moments, 0.9)
            torch._foreach_add_(moments, gradients, alpha=0.1)
            norms = torch._foreach_norm(moments)
            scaled = torch._foreach_div(moments, torch._foreach_add(norms, 1e-6))
            torch._foreach_add_(weights, scaled, alpha=-1e-2)
    return b.state() | {"norms": torch.stack(norms)}


@idiom()
def slow_weights_look_ahead(b: Bench) -> Found:
    """Lookahead around the base optimizer, slow weights in a dict by weight."""
    slow: dict[Any, dict[str, torch.Tensor]] = defaultdict(dict)
    for group in b.optimizer.param_groups:
        for p in group["params"]:
            slow[p]["w"] = torch.zeros_like(p.data)
            slow[p]["w"].copy_(p.data)
    for seed in range(4):
        b.step(seed)
        if seed % 2:
            for group in b.optimizer.param_groups:
                for p in group["params"]:
                    slow[p]["w"].add_(p.data - slow[p]["w"], alpha=0.5)
                    p.data.copy_(slow[p]["w"])
    return b.state()


@idiom()
def an_optimizer_wraps_another(b: Bench) -> Found:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            super().__init__(base.param_groups, base.defaults)
            self.base, self.param_groups, self.state = base, base.param_groups, base.state

        def step(self, closure: Any = None) -> Any:
            self.base.step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.base.state[p]
                    if "slow" not in state:
                        state["slow"] = torch.empty_like(p.data)
                        state["slow"].copy_(p.data)
                    state["slow"].add_(p.data - state["slow"], alpha=0.5)
                    p.data.copy_(state["slow"])

    optimizer = Lookahead(torch.optim.SGD(b.model.parameters(), 1e-2, momentum=0.9))
    for seed in range(3):
        optimizer.zero_grad()
        b.loss(seed).backward()
        optimizer.step()
    return b.state() | {f"slow {i}": kept(optimizer.state[p]["slow"]) for i, p in enumerate(b.model.parameters())}


@idiom()
def two_optimizers_share_a_model(b: Bench) -> Found:
    """Matrices by one optimizer, the rest by another."""
    first = torch.optim.Adam(matrices(b), 1e-2)
    second = torch.optim.SGD([p for p in b.model.parameters() if p.dim() != 2], 1e-2)
    for seed in range(2):
        for optimizer in (first, second):
            optimizer.zero_grad()
        b.loss(seed).backward()
        first.step()
        second.step()
    return b.state()
