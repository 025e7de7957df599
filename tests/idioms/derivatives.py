"""Gradients that are changed, differentiated again and seen by hooks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


@idiom
def conflicting_gradients_are_projected(b: Bench) -> Found:
    """PCGrad: what one task's gradient has against another's is taken out."""
    tasks = []
    for seed in range(2):
        b.optimizer.zero_grad()
        b.loss(seed).backward()
        tasks.append([p.grad.clone() for p in b.model.parameters()])
    product = sum((x * y).sum() for x, y in zip(*tasks, strict=True))
    square = sum((y * y).sum() for y in tasks[1])
    for p, x, y in zip(b.model.parameters(), *tasks, strict=True):
        p.grad = x - (product / square) * y + y
    return b.gradients() | {"product": product}


@idiom
def an_image_is_attacked_in_several_projected_steps(b: Bench) -> Found:
    """PGD with a random start."""
    x = b.images()
    torch.manual_seed(8)
    delta = torch.zeros_like(x).uniform_(-0.1, 0.1).requires_grad_()
    for _ in range(3):
        F.cross_entropy(b.model(x + delta), b.labels()).backward()
        delta.data = (delta.data + 0.05 * delta.grad.sign()).clamp(-0.1, 0.1)
        delta.grad.zero_()
    return {"delta": delta}


@idiom
def the_trace_of_the_hessian_is_estimated(b: Bench) -> Found:
    weights = [b.model.second.weight, b.model.head.weight]
    grads = torch.autograd.grad(b.loss(), weights, create_graph=True)
    torch.manual_seed(5)
    signs = [torch.randint_like(w, 2) * 2 - 1 for w in weights]
    products = torch.autograd.grad(grads, weights, grad_outputs=signs)
    return {"trace": sum((h * s).sum() for h, s in zip(products, signs, strict=True))}


@idiom
def a_residual_of_a_differential_equation_is_a_loss(b: Bench) -> Found:
    """A physics-informed network: second derivatives for the inputs, then gradients of the weights."""
    net = b.made(lambda: nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)))
    points = b.place(torch.linspace(-1, 1, 14, dtype=torch.float64).view(7, 2), "n-").requires_grad_()
    u = net(points)
    (first,) = torch.autograd.grad(u, points, torch.ones_like(u), create_graph=True)
    (second,) = torch.autograd.grad(first[:, :1], points, torch.ones_like(u), create_graph=True)
    (first[:, 1:] + u * first[:, :1] - 0.01 * second[:, :1]).pow(2).mean().backward()
    return b.gradients(net)


@idiom
def weights_are_stepped_as_their_gradients_come(b: Bench) -> Found:
    """An optimizer for each weight, stepped in the backward pass."""
    optimizers = {p: torch.optim.Adam([p], 1e-2) for p in b.model.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in b.model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for seed in range(2):
        b.loss(seed).backward()
    return b.state()
