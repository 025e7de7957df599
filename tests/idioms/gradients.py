"""Gradients: clipped, read, changed, differentiated again, and seen by hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.idioms.bench import Bench, Found, kept
from tests.idioms.table import idiom

# -- clipping ---------------------------------------------------------------------------------------------------------


def clipped(b: Bench, **options: Any) -> Found:
    b.loss().backward()
    norm = nn.utils.clip_grad_norm_(b.model.parameters(), 0.1, **options)
    return b.gradients() | {"norm": norm}


@idiom(quick=True)
def the_norm_of_all_gradients_is_clipped(b: Bench) -> Found:
    return clipped(b)


@idiom()
def the_largest_gradient_is_clipped(b: Bench) -> Found:
    return clipped(b, norm_type=float("inf"))


@idiom()
def the_norm_is_clipped_one_tensor_at_a_time(b: Bench) -> Found:
    return clipped(b, norm_type=1.0, foreach=False, error_if_nonfinite=True)


@idiom()
def gradients_are_clipped_by_value(b: Bench) -> Found:
    b.loss().backward()
    nn.utils.clip_grad_value_(b.model.parameters(), 0.01)
    return b.gradients()


@idiom()
def a_total_norm_is_taken_and_used_later(b: Bench) -> Found:
    b.loss().backward()
    norm = nn.utils.get_total_norm([p.grad for p in b.model.parameters()])
    nn.utils.clip_grads_with_norm_(b.model.parameters(), 0.1, norm)
    return b.gradients() | {"norm": norm}


@idiom()
def gradients_are_clipped_by_the_units_weights(b: Bench) -> Found:
    """Adaptive gradient clipping, as timm has it."""
    b.loss().backward()

    def unitwise(x: torch.Tensor) -> torch.Tensor:
        return x.norm(2.0) if x.ndim <= 1 else x.norm(2.0, dim=tuple(range(1, x.ndim)), keepdim=True)

    for p in b.model.parameters():
        largest = unitwise(p.detach()).clamp_(min=1e-3).mul_(0.01)
        norm = unitwise(p.grad.detach())
        clipped = p.grad.detach() * (largest / norm.clamp(min=1e-6))
        p.grad.detach().copy_(torch.where(norm < largest, p.grad.detach(), clipped))
    return b.gradients()


# -- reading and changing ---------------------------------------------------------------------------------------------


@idiom()
def norms_of_layers_are_logged(b: Bench) -> Found:
    b.loss().backward()
    norms = {n: p.grad.data.norm(2).item() for n, p in b.model.named_parameters()}
    return norms | {"total": sum(norm**2 for norm in norms.values()) ** 0.5}


@idiom()
def gradients_are_flattened_into_one_vector(b: Bench) -> Found:
    b.loss().backward()
    return {"vector": torch.cat([p.grad.flatten() for p in b.model.parameters()])}


@idiom()
def gradients_are_written_from_one_vector(b: Bench) -> Found:
    b.loss().backward()
    vector = torch.cat([p.grad.view(-1) for p in b.model.parameters()]) * 0.5
    start = 0
    for p in b.model.parameters():
        p.grad = vector[start : start + p.numel()].view_as(p).clone()
        start += p.numel()
    b.optimizer.step()
    return b.state()


@idiom()
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


@idiom()
def gradients_are_centralized(b: Bench) -> Found:
    b.loss().backward()
    for p in b.model.parameters():
        if p.grad.dim() > 1:
            p.grad.add_(-p.grad.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True))
    return b.gradients()


@idiom()
def gradients_get_noise(b: Bench) -> Found:
    b.loss().backward()
    torch.manual_seed(4)
    for p in b.model.parameters():
        p.grad += 0.01 * torch.randn_like(p.grad)
    return b.gradients()


@idiom()
def steps_with_gradients_that_are_no_numbers_are_skipped(b: Bench) -> Found:
    for seed in range(3):
        b.optimizer.zero_grad()
        (b.loss(seed) * (float("nan") if seed == 1 else 1.0)).backward()
        if all(torch.isfinite(p.grad).all() for p in b.model.parameters()):
            b.optimizer.step()
    return b.state()


@idiom()
def gradients_are_replaced_by_their_signs(b: Bench) -> Found:
    b.loss().backward()
    for p in b.model.parameters():
        p.grad = p.grad.sign()
    b.optimizer.step()
    return b.state()


@idiom()
def gradients_are_kept_over_a_second_backward_pass(b: Bench) -> Found:
    loss = b.loss()
    loss.backward(retain_graph=True)
    first = b.gradients()
    loss.backward()
    return b.gradients() | {f"once {n}": g for n, g in first.items()}


@idiom()
def gradients_are_set_to_zero_and_not_to_none(b: Bench) -> Found:
    b.loss(0).backward()
    b.optimizer.zero_grad(set_to_none=False)
    b.loss(1).backward()
    return b.gradients()


@idiom()
def the_gradient_of_the_image_is_a_saliency_map(b: Bench) -> Found:
    x = b.images().requires_grad_()
    scores = b.model.eval()(x)
    scores.gather(1, scores.argmax(1, keepdim=True)).sum().backward()
    return {"map": x.grad.abs().amax(1)}


@idiom()
def class_activation_maps_weigh_the_features(b: Bench) -> Found:
    """Grad-CAM."""
    maps = b.model.features(b.images())
    maps.retain_grad()
    scores = b.model.head(F.relu(b.model.hidden(maps.mean((2, 3)))))
    scores.max(1).values.sum().backward()
    cam = F.relu((maps.grad.mean((2, 3), keepdim=True) * maps).sum(1, keepdim=True))
    low, high = cam.amin((2, 3), keepdim=True), cam.amax((2, 3), keepdim=True)
    return {"map": F.interpolate((cam - low) / (high - low + 1e-6), size=(14, 18), mode="bilinear")}


@idiom()
def an_image_is_changed_along_the_sign_of_its_gradient(b: Bench) -> Found:
    """The fast gradient sign method."""
    x = b.images().requires_grad_()
    F.cross_entropy(b.model(x), b.labels()).backward()
    attacked = (x + 0.1 * x.grad.sign()).clamp(-2, 2).detach()
    b.optimizer.zero_grad()
    F.cross_entropy(b.model(attacked), b.labels()).backward()
    return b.gradients() | {"attacked": attacked}


@idiom()
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


@idiom()
def samples_have_gradients_one_by_one(b: Bench) -> Found:
    b.model.eval()
    losses = F.cross_entropy(b.model(b.images()), b.labels(), reduction="none")
    norms = []
    for index in range(len(losses)):
        grads = torch.autograd.grad(losses[index], list(b.model.parameters()), retain_graph=True)
        norms.append(torch.stack([g.norm() for g in grads]).norm())
    return {"norms": torch.stack(norms)}


@idiom()
def unused_weights_have_no_gradient(b: Bench) -> Found:
    loss = F.cross_entropy(b.model.first(b.images()).mean((2, 3)), b.labels())
    grads = torch.autograd.grad(loss, list(b.model.parameters()), allow_unused=True)
    return {str(i): torch.zeros(1) if g is None else g for i, g in enumerate(grads)}


# -- second derivatives -----------------------------------------------------------------------------------------------


def critic(b: Bench) -> Any:
    return b.made(lambda: nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(6, 1, 3), nn.Flatten()))


@idiom(quick=True)
def a_critic_pays_for_slopes_other_than_one(b: Bench) -> Found:
    """WGAN-GP."""
    net, real, fake = critic(b), b.images(0), b.images(1)
    share = b.place(torch.rand(5, 1, 1, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    mixed = (share * real + (1 - share) * fake).requires_grad_()
    scores = net(mixed)
    slopes = torch.autograd.grad(scores, mixed, torch.ones_like(scores), create_graph=True, retain_graph=True)[0]
    penalty = ((slopes.view(len(slopes), -1).norm(2, dim=1) - 1) ** 2).mean()
    loss = net(fake).mean() - net(real).mean() + 10 * penalty
    loss.backward()
    return b.gradients(net) | {"penalty": penalty}


@idiom()
def a_critic_pays_for_slopes_at_real_images(b: Bench) -> Found:
    """R1, as in StyleGAN."""
    net, real = critic(b), b.images(0).requires_grad_()
    scores = net(real)
    (slopes,) = torch.autograd.grad(outputs=scores.sum(), inputs=real, create_graph=True)
    (F.softplus(-scores).mean() + 5.0 * slopes.pow(2).reshape(slopes.shape[0], -1).sum(1).mean()).backward()
    return b.gradients(net)


@idiom()
def a_generator_pays_for_uneven_paths(b: Bench) -> Found:
    """Path length regularization."""
    net = b.made(lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 3, 3, padding=1)))
    z = b.images().requires_grad_()
    fake = net(z)
    torch.manual_seed(9)
    noise = torch.randn_like(fake) / (fake.shape[2] * fake.shape[3]) ** 0.5
    (grad,) = torch.autograd.grad((fake * noise).sum(), z, create_graph=True)
    lengths = grad.pow(2).sum((1, 2, 3)).sqrt()
    (lengths - lengths.mean().detach()).pow(2).mean().backward()
    return b.gradients(net)


@idiom()
def a_penalty_on_the_gradients_of_the_weights(b: Bench) -> Found:
    loss = b.loss()
    grads = torch.autograd.grad(loss, list(b.model.parameters()), create_graph=True)
    (loss + 0.1 * sum(g.pow(2).sum() for g in grads)).backward()
    return b.gradients()


@idiom()
def a_vector_is_multiplied_by_the_hessian(b: Bench) -> Found:
    weights = list(b.model.eval().parameters())
    grads = torch.autograd.grad(b.loss(), weights, create_graph=True)
    product = sum((g * w.detach()).sum() for g, w in zip(grads, weights, strict=True))
    return {str(i): h for i, h in enumerate(torch.autograd.grad(product, weights))}


@idiom()
def the_trace_of_the_hessian_is_estimated(b: Bench) -> Found:
    weights = [b.model.second.weight, b.model.head.weight]
    grads = torch.autograd.grad(b.loss(), weights, create_graph=True)
    torch.manual_seed(5)
    signs = [torch.randint_like(w, 2) * 2 - 1 for w in weights]
    products = torch.autograd.grad(grads, weights, grad_outputs=signs)
    return {"trace": sum((h * s).sum() for h, s in zip(products, signs, strict=True))}


@idiom()
def weights_are_learned_through_an_inner_step(b: Bench) -> Found:
    """MAML."""
    named = dict(b.model.named_parameters())
    grads = torch.autograd.grad(b.loss(0), list(named.values()), create_graph=True)
    fast = {n: w - 0.1 * g for (n, w), g in zip(named.items(), grads, strict=True)}
    scores = torch.func.functional_call(b.model, fast, (b.images(1),))
    F.cross_entropy(scores, b.labels()).backward()
    return b.gradients()


@idiom()
def a_residual_of_a_differential_equation_is_a_loss(b: Bench) -> Found:
    """A physics-informed network: second derivatives for the inputs, then gradients of the weights."""
    net = b.made(lambda: nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)))
    points = b.place(torch.linspace(-1, 1, 14, dtype=torch.float64).view(7, 2), "n-").requires_grad_()
    u = net(points)
    (first,) = torch.autograd.grad(u, points, torch.ones_like(u), create_graph=True)
    (second,) = torch.autograd.grad(first[:, :1], points, torch.ones_like(u), create_graph=True)
    (first[:, 1:] + u * first[:, :1] - 0.01 * second[:, :1]).pow(2).mean().backward()
    return b.gradients(net)


@idiom()
def an_encoder_pays_for_its_jacobian(b: Bench) -> Found:
    x = b.images().requires_grad_()
    hidden = b.model.eval()(x)
    torch.manual_seed(6)
    direction = F.normalize(torch.randn_like(hidden), dim=1)
    (grad,) = torch.autograd.grad(hidden, x, direction, create_graph=True)
    (hidden.square().mean() + grad.flatten(1).norm(dim=1).mean()).backward()
    return b.gradients()


# -- hooks ------------------------------------------------------------------------------------------------------------


@idiom(quick=True)
def hooks_on_weights_scale_gradients(b: Bench) -> Found:
    seen = {}
    for name, p in b.model.named_parameters():
        p.register_hook(lambda g, name=name: seen.__setitem__(name, kept(g)) or g * 0.5)
    b.loss().backward()
    return b.gradients() | {f"seen {n}": g for n, g in seen.items()}


@idiom()
def forward_hooks_collect_features(b: Bench) -> Found:
    found: Found = {}
    handle = b.model.second.register_forward_hook(lambda m, x, y: found.update(x=x[0], y=y))
    b.model.up.register_forward_pre_hook(lambda m, x: (x[0] * 2,))
    b.loss().backward()
    handle.remove()
    return found | b.gradients()


@idiom()
def full_backward_hooks_see_gradients_of_layers(b: Bench) -> Found:
    found: Found = {}
    b.model.second.register_full_backward_hook(lambda m, x, y: found.update(into=kept(x[0]), out=kept(y[0])))
    b.model.head.register_full_backward_pre_hook(lambda m, y: (y[0] * 2,))
    b.loss().backward()
    return found | b.gradients()


@idiom()
def hooks_on_features_reverse_gradients(b: Bench) -> Found:
    maps = b.model.features(b.images())
    maps.register_hook(lambda g: -g)
    F.cross_entropy(b.model.head(b.model.hidden(maps.mean((2, 3)))), b.labels()).backward()
    return b.gradients()


@idiom()
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


@idiom()
def a_hook_waits_for_several_gradients(b: Bench) -> Found:
    found: Found = {}
    weights = [b.model.first.weight, b.model.head.weight]
    torch.autograd.graph.register_multi_grad_hook(
        weights, lambda grads: found.update({str(i): kept(g) for i, g in enumerate(grads)})
    )
    b.loss().backward()
    return found
