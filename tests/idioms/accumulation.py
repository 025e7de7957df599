"""Gradients of several batches before one step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


def accumulated(b: Bench, between: Callable[[Bench], Found | None]) -> Found:
    """Two steps of three batches each; ``between`` comes after the first two, whose gradients are not yet summed."""
    found = {}
    for step in range(2):
        for batch in range(3):
            if batch < 2:
                with b.no_sync():
                    b.loss(3 * step + batch).backward()
                found |= {f"{step} {batch} {k}": v for k, v in (between(b) or {}).items()}
            else:
                b.loss(3 * step + batch).backward()
        b.optimizer.step()
        b.optimizer.zero_grad()
    return b.state() | found


@idiom(quick=True)
def losses_are_divided_and_summed(b: Bench) -> Found:
    for step in range(2):
        for batch in range(3):
            (b.loss(3 * step + batch) / 3).backward()
        b.optimizer.step()
        b.optimizer.zero_grad()
    return b.state()


@idiom()
def nothing_happens_between(b: Bench) -> Found:
    return accumulated(b, lambda b: None)


@idiom()
def gradients_are_scaled_between(b: Bench) -> Found:
    def scale(b: Bench) -> None:
        for p in b.model.parameters():
            p.grad.mul_(0.5)

    return accumulated(b, scale)


@idiom()
def gradients_are_replaced_between(b: Bench) -> Found:
    def scale(b: Bench) -> None:
        for p in b.model.parameters():
            p.grad = p.grad * 0.5

    return accumulated(b, scale)


@idiom()
def the_data_of_gradients_is_scaled_between(b: Bench) -> Found:
    def scale(b: Bench) -> None:
        for p in b.model.parameters():
            p.grad.data.mul_(0.5)
            p.grad.detach().add_(0.01)

    return accumulated(b, scale)


@idiom()
def many_gradients_are_scaled_at_once_between(b: Bench) -> Found:
    def scale(b: Bench) -> None:
        torch._foreach_mul_([p.grad for p in b.model.parameters()], 0.5)

    return accumulated(b, scale)


@idiom()
def norms_are_clipped_between(b: Bench) -> Found:
    return accumulated(b, lambda b: {"norm": nn.utils.clip_grad_norm_(b.model.parameters(), 0.1)})


@idiom()
def values_are_clipped_between(b: Bench) -> Found:
    return accumulated(b, lambda b: nn.utils.clip_grad_value_(b.model.parameters(), 0.01))  # which returns None


@idiom()
def gradients_are_read_between(b: Bench) -> Found:
    return accumulated(b, lambda b: b.gradients())


@idiom()
def weights_are_stepped_between(b: Bench) -> Found:
    return accumulated(b, lambda b: b.optimizer.step())


@idiom()
def weights_are_stepped_and_gradients_dropped_between(b: Bench) -> Found:
    def step(b: Bench) -> None:
        b.optimizer.step()
        b.optimizer.zero_grad()

    return accumulated(b, step)


@idiom()
def gradients_are_put_away_between(b: Bench) -> Found:
    def drop(b: Bench) -> None:
        for p in b.model.parameters():
            p.grad = None

    return accumulated(b, drop)


@idiom()
def all_steps_come_after_batches_without_sums(b: Bench) -> Found:
    for seed in range(2):
        b.optimizer.zero_grad()
        with b.no_sync():
            b.loss(seed).backward()
        b.optimizer.step()
    return b.state()


@idiom()
def scaled_losses_are_accumulated(b: Bench) -> Found:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for seed in range(2):
        with b.no_sync():
            scaler.scale(b.loss(seed) / 2).backward()
    scaler.unscale_(b.optimizer)
    scaler.step(b.optimizer)
    scaler.update()
    return b.state()


@idiom()
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


@idiom()
def other_gradients_are_asked_for_between(b: Bench) -> Found:
    with b.no_sync():
        b.loss(0).backward()
    grads = torch.autograd.grad(b.loss(1), list(b.model.parameters()))
    b.optimizer.step()
    return b.state() | {f"other {i}": g for i, g in enumerate(grads)}


@idiom()
def the_mean_of_kept_gradients_is_taken(b: Bench) -> Found:
    kept = [torch.zeros_like(p) for p in b.model.parameters()]
    for seed in range(3):
        b.optimizer.zero_grad()
        b.loss(seed).backward()
        for k, p in zip(kept, b.model.parameters(), strict=True):
            k += p.grad / 3
    for k, p in zip(kept, b.model.parameters(), strict=True):
        p.grad = k
    b.optimizer.step()
    return b.state()
