"""Adversarial, self-supervised, distilled and diffusion training."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.distconv.layouts import normal
from tests.idioms.adversarial import judge, painter, states
from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom

# -- self-supervised --------------------------------------------------------------------------------------------------


@idiom()
def a_teacher_follows_its_student(b: Bench) -> Found:
    """BYOL: a predictor, a stopped gradient, a momentum encoder."""
    student = b.model
    teacher = copy.deepcopy(student)
    for p in teacher.parameters():
        p.requires_grad = False
    predictor = b.made(lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 5)))
    optimizer = torch.optim.SGD([*student.parameters(), *predictor.parameters()], 0.05)
    for seed in range(2):
        p = F.normalize(predictor(student(b.images(seed))), dim=-1)
        with torch.no_grad():
            z = F.normalize(teacher(b.images(seed).flip(-1)), dim=-1)
        optimizer.zero_grad()
        (2 - 2 * (p * z.detach()).sum(dim=-1)).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * (1.0 - 0.9)
    return states(b, student=student, teacher=teacher, predictor=predictor)


@idiom()
def keys_wait_in_a_queue(b: Bench) -> Found:
    """MoCo: a queue in a buffer that each batch overwrites in part."""
    slow = copy.deepcopy(b.model)
    queue, place = F.normalize(normal(5, 12, seed=3), dim=0), 0
    for seed in range(3):
        q = F.normalize(b.model(b.images(seed)), dim=1)
        with torch.no_grad():
            for k, p in zip(slow.parameters(), b.model.parameters(), strict=True):
                k.data.mul_(0.9).add_(p.data, alpha=0.1)
            order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
            k = F.normalize(slow(b.images(seed)[order]), dim=1)[torch.argsort(order)]
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / 0.2
        b.optimizer.zero_grad()
        F.cross_entropy(logits, torch.zeros(5, dtype=torch.long)).backward()
        b.optimizer.step()
        width = min(5, 12 - place)
        queue[:, place : place + width] = k.T[:, :width]
        place = (place + width) % 12
    return b.state() | {"queue": queue}


@idiom()
def a_centre_keeps_a_teacher_from_collapse(b: Bench) -> Found:
    """DINO: sharpened and centred outputs; the centre is a buffer."""
    teacher = copy.deepcopy(b.model).requires_grad_(False)
    centre = torch.zeros(1, 5, dtype=torch.float64)
    for seed in range(2):
        views = [b.images(seed), b.images(seed).flip(2), b.images(seed)[:, :, :5, :6]]
        out = [b.model(v) / 0.1 for v in views]
        with torch.no_grad():
            raw = torch.cat([teacher(v) for v in views[:2]])
            soft = F.softmax((raw - centre) / 0.04, dim=-1).detach().chunk(2)
        pairs = [(q, v) for i, q in enumerate(soft) for j, v in enumerate(out) if i != j]
        loss = sum(torch.sum(-q * F.log_softmax(v, dim=-1), dim=-1).mean() for q, v in pairs) / len(pairs)
        b.optimizer.zero_grad()
        loss.backward()
        b.optimizer.step()
        centre = centre * 0.9 + torch.sum(raw, dim=0, keepdim=True) / len(raw) * 0.1
        with torch.no_grad():
            for q, k in zip(b.model.parameters(), teacher.parameters(), strict=True):
                k.data.mul_(0.99).add_((1 - 0.99) * q.detach().data)
    return states(b, model=b.model, teacher=teacher) | {"centre": centre}


@idiom()
def prototypes_share_a_batch_evenly(b: Bench) -> Found:
    """SwAV: Sinkhorn-Knopp on the scores."""
    prototypes = b.made(lambda: nn.Linear(5, 6, bias=False))
    with torch.no_grad():
        w = F.normalize(prototypes.weight.data.clone(), dim=1, p=2)
        prototypes.weight.copy_(w)
    scores = prototypes(F.normalize(b.model(b.images()), dim=1))
    with torch.no_grad():
        q = torch.exp(scores / 0.05).t()
        q /= torch.sum(q)
        for _ in range(3):
            q /= torch.sum(q, dim=1, keepdim=True) * 6
            q /= torch.sum(q, dim=0, keepdim=True) * 5
        q = (q * 5).t()
    (-torch.mean(torch.sum(q * F.log_softmax(scores / 0.1, dim=1), dim=1))).backward()
    return b.gradients() | b.gradients(prototypes)


@idiom()
def pixels_that_were_hidden_are_painted(b: Bench) -> Found:
    """Masked image modelling: a token for hidden patches, the loss there alone."""
    net, x = b.made(painter), b.images()
    token = nn.Parameter(torch.zeros(1, 3, 1, 1, dtype=torch.float64))
    torch.manual_seed(4)
    hidden = (torch.rand(5, 1, 4, 3) < 0.5).double()
    mask = hidden.repeat_interleave(2, 2).repeat_interleave(3, 3)[:, :, :7]
    y = net(x * (1 - mask) + token * mask)
    loss = (F.l1_loss(x, y, reduction="none") * mask).sum() / (mask.sum() + 1e-5) / 3
    loss.backward()
    return b.gradients(net) | {"token": token.grad}


# -- distillation and pseudo labels -----------------------------------------------------------------------------------


@idiom()
def a_student_learns_from_a_teachers_answers(b: Bench) -> Found:
    teacher = b.made(
        lambda: nn.Sequential(
            nn.Conv2d(3, 10, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 5)
        )
    )
    teacher.eval()
    x = b.images()
    y = b.model(x)
    with torch.no_grad():
        theirs = teacher(x)
    soft = F.kl_div(F.log_softmax(y / 4, dim=1), F.softmax(theirs / 4, dim=1), reduction="batchmean") * 16
    maps, other = b.model.begin(x).pow(2).mean(1).flatten(1), teacher[:2](x)
    other = F.interpolate(other, size=(7, 9), mode="bilinear").pow(2).mean(1).flatten(1)
    attention = (F.normalize(maps) - F.normalize(other)).pow(2).mean()
    (0.7 * soft + 0.3 * F.cross_entropy(y, b.labels()) + attention).backward()
    return b.gradients()


@idiom()
def sure_answers_become_labels(b: Bench) -> Found:
    """FixMatch: labelled and unlabelled in one pass, split, masked by confidence."""
    x = torch.cat([b.images(0)[:2], b.images(1), b.images(1).flip(3)])
    y = b.model(x)
    known = y[:2]
    weak, strong = y[2:].chunk(2)
    sure, guess = torch.max(torch.softmax(weak.detach() * 20, dim=-1), dim=-1)
    mask = sure.ge(0.3).double()
    loss = F.cross_entropy(known, b.labels()[:2]) + (F.cross_entropy(strong, guess, reduction="none") * mask).mean()
    loss.backward()
    return b.gradients() | {"mask": mask, "guess": guess}


@idiom()
def a_mean_teacher_judges_pixels(b: Bench) -> Found:
    net = b.made(lambda: nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7), nn.ReLU(), nn.Conv2d(7, 5, 1)))
    teacher = copy.deepcopy(net)
    for p in teacher.parameters():
        p.detach_()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    for step in range(2):
        x = b.images(step)
        torch.manual_seed(step)
        noise = torch.clamp(torch.randn_like(x) * 0.1, -0.2, 0.2)
        with torch.no_grad():
            soft = torch.softmax(teacher(x + noise), dim=1)
        y = net(x)
        unsure = -1.0 * torch.sum(soft * torch.log(soft + 1e-6), dim=1, keepdim=True)
        mask = (unsure < 1.5).double()
        apart = (torch.softmax(y, 1) - soft) ** 2
        loss = F.cross_entropy(y[:3], b.masks()[:3]) + torch.sum(mask * apart) / (2 * torch.sum(mask) + 1e-16)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        alpha = min(1 - 1 / (step + 1), 0.99)
        for slow, fast in zip(teacher.parameters(), net.parameters(), strict=True):
            slow.data.mul_(alpha).add_(fast.data, alpha=1 - alpha)
    return states(b, net=net, teacher=teacher)


@idiom()
def several_tasks_weigh_themselves(b: Bench) -> Found:
    """Learned uncertainties of tasks, in the same optimizer as the network."""
    logs = nn.ParameterList([nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2)])
    maps = b.made(lambda: nn.Conv2d(7, 5, 1))
    optimizer = torch.optim.Adam(
        [{"params": b.model.parameters()}, {"params": maps.parameters()}, {"params": logs, "lr": 0.1}], 1e-2
    )
    for seed in range(2):
        losses = [b.loss(seed), F.cross_entropy(maps(b.model.begin(b.images(seed))), b.masks())]
        total = sum(torch.exp(-s) * loss + s for s, loss in zip(logs, losses, strict=True))
        optimizer.zero_grad()
        total.sum().backward()
        optimizer.step()
    return b.state() | {"logs": torch.cat([p.data for p in logs])}


# -- diffusion --------------------------------------------------------------------------------------------------------


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.down, self.up = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(16, 8, 3, 1, 1)
        self.time, self.out = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 16)), nn.Conv2d(8, 3, 3, 1, 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        steps = torch.exp(torch.arange(3, device=x.device) * -(math.log(10000) / 2)).to(x.dtype)
        embedded = t.to(x.dtype)[:, None] * steps[None, :]
        scale, shift = self.time(torch.cat((embedded.sin(), embedded.cos()), dim=-1))[:, :, None, None].chunk(2, dim=1)
        x = self.into(x)
        y = F.silu(F.group_norm(self.down(x), 4) * (scale + 1) + shift)
        y = F.interpolate(y, size=x.shape[2:], mode="nearest")
        return self.out(F.silu(self.up(torch.cat((x, y), dim=1))))


def schedule() -> torch.Tensor:
    return torch.cumprod(1.0 - torch.linspace(1e-3, 0.3, 10, dtype=torch.float64), dim=0)


@idiom(quick=True)
def noise_of_a_random_time_is_predicted(b: Bench) -> Found:
    """DDPM's loss: times and noise are drawn, the schedule is a plain buffer indexed by times."""
    net, kept = b.made(Denoiser), schedule()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    torch.manual_seed(2)
    for seed in range(2):
        x = b.images(seed)
        t = torch.randint(0, 10, (x.shape[0],), device=x.device).long()
        noise = torch.randn_like(x)
        noisy = kept.sqrt().gather(-1, t).reshape(-1, 1, 1, 1) * x + (1 - kept).sqrt()[t][:, None, None, None] * noise
        loss = F.mse_loss(net(noisy, t), noise, reduction="none").mean((1, 2, 3))
        optimizer.zero_grad()
        (loss * (kept[t] / (1 - kept[t])).clamp(max=5)).mean().backward()
        optimizer.step()
    return b.state(net)


@idiom()
def images_are_drawn_step_by_step(b: Bench) -> Found:
    """DDPM and DDIM sampling with guidance."""
    net, kept = b.made(Denoiser).eval(), schedule()
    torch.manual_seed(3)
    x = torch.randn(5, 3, 7, 9, dtype=torch.float64)
    x = b.place(x)
    with torch.no_grad():
        for i in reversed(range(4)):
            t = torch.full((x.shape[0],), i, dtype=torch.long)
            both = net(torch.cat([x, x * 0.5]), torch.cat([t, t]))
            given, free = both.chunk(2)
            noise = free + 2.0 * (given - free)
            clean = ((x - (1 - kept[i]).sqrt() * noise) / kept[i].sqrt()).clamp(-1, 1)
            x = kept[i - 1].sqrt() * clean + (1 - kept[i - 1]).sqrt() * noise if i else clean
            x = x + 0.1 * torch.randn_like(x) if i else x
    return {"x": x}


@idiom()
def velocities_between_noise_and_images_are_matched(b: Bench) -> Found:
    """Flow matching, and an Euler integration."""
    net = b.made(Denoiser)
    torch.manual_seed(4)
    x = b.images()
    t = torch.rand(5, 1, 1, 1, dtype=x.dtype)
    z = torch.randn_like(x)
    F.mse_loss(net(torch.lerp(z, x, t), t.flatten()), x - z).backward()
    with torch.no_grad():
        y = z
        for i in range(3):
            y = y + net(y, torch.full((5,), i / 3)) / 3
    return b.gradients(net) | {"y": y}


@idiom()
def scores_are_followed_with_noise(b: Bench) -> Found:
    """Langevin dynamics of an energy, images as leaves."""
    energy = b.made(judge)
    x = b.images().clone().requires_grad_(True)
    torch.manual_seed(5)
    for _ in range(3):
        (grad,) = torch.autograd.grad(energy(x).sum(), x)
        x.data.add_(grad, alpha=-0.1).add_(torch.randn_like(x), alpha=0.01).clamp_(-2, 2)
    return {"x": x}


@idiom()
def a_latent_is_optimized_by_itself(b: Bench) -> Found:
    """Inversion, style transfer: an optimizer of an image, the network frozen."""
    net = b.made(painter).eval().requires_grad_(False)
    x = b.images().clone().requires_grad_()
    target = b.images(1).tanh()
    optimizer = torch.optim.Adam([x], 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(net(x), target).backward()
        optimizer.step()
    second = torch.optim.LBFGS([x], 0.1, max_iter=3)

    def closure() -> torch.Tensor:
        second.zero_grad()
        loss = F.mse_loss(net(x), target)
        loss.backward()
        return loss

    second.step(closure)
    return {"x": x}
