"""Two networks that play against each other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.distconv.layouts import normal
from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


def painter(channels: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3, padding=1, bias=False),
        nn.InstanceNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 3, 3, padding=1),
        nn.Tanh(),
    )


def judge(channels: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.LeakyReLU(0.2), nn.Conv2d(6, 1, 3, 1, 1)
    )


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), 1e-2, betas=(0.5, 0.999))


def states(b: Bench, **modules: Any) -> Found:
    return {f"{m} {n}": t for m, module in modules.items() for n, t in b.state(module).items()}


# -- adversarial ------------------------------------------------------------------------------------------------------


@idiom(quick=True)
def two_networks_play_against_each_other(b: Bench) -> Found:
    """DCGAN's loop: real, fake detached, and the generator through the critic."""
    make, critic = b.made(painter), b.made(judge, 6)
    first, second = adam(make), adam(critic)
    bce = nn.BCEWithLogitsLoss()
    for seed in range(2):
        second.zero_grad()
        real = critic(b.images(seed))
        bce(real, torch.ones_like(real)).backward()
        fake = make(b.images(seed + 5))
        judged = critic(fake.detach())
        bce(judged, torch.zeros_like(judged)).backward()
        second.step()
        first.zero_grad()
        judged = critic(fake)
        bce(judged, torch.full(judged.shape, 1.0, dtype=judged.dtype, device=judged.device)).backward()
        first.step()
    return states(b, make=make, critic=critic)


@idiom()
def a_generator_grows_images_from_vectors(b: Bench) -> Found:
    make = b.made(
        lambda: nn.Sequential(
            nn.ConvTranspose2d(4, 6, (3, 4), bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.ConvTranspose2d(6, 3, 3, 2)
        )
    )
    critic = b.made(judge, 6)
    optimizer = adam(make)
    for seed in range(2):
        z = b.place(normal(5, 4, 1, 1, seed=seed))
        optimizer.zero_grad()
        F.relu(1.0 - critic(make(z))).mean().backward()
        optimizer.step()
    return states(b, make=make)


@idiom()
def weights_of_a_critic_are_clipped(b: Bench) -> Found:
    """WGAN, several critic steps to one of the generator, losses of opposite sign."""
    make, critic = b.made(painter), b.made(judge, 6)
    first = torch.optim.RMSprop(make.parameters(), 1e-2)
    second = torch.optim.RMSprop(critic.parameters(), 1e-2)
    one = torch.tensor(1.0, dtype=torch.float64)
    for seed in range(2):
        for p in critic.parameters():
            p.requires_grad = True
        for turn in range(2):
            for p in critic.parameters():
                p.data.clamp_(-0.05, 0.05)
            critic.zero_grad()
            with torch.no_grad():
                fake = make(b.images(turn + seed))
            critic(b.images(seed)).mean().backward(-one)
            critic(fake).mean().backward(one)
            second.step()
        for p in critic.parameters():
            p.requires_grad = False
        make.zero_grad()
        (-critic(make(b.images(7))).mean()).backward()
        first.step()
    return states(b, make=make, critic=critic)


@idiom()
def images_go_there_and_back(b: Bench) -> Found:
    """CycleGAN: two generators in one optimizer, a pool of former fakes."""
    there, back, critic = b.made(painter), b.made(painter, 6), b.made(judge, 7)
    optimizer = torch.optim.Adam([*there.parameters(), *back.parameters()], 1e-2)
    pool = []
    for seed in range(2):
        x, y = b.images(seed), b.images(seed + 3)
        fake = there(x)
        judged = critic(fake)
        loss = F.mse_loss(judged, torch.ones_like(judged)) + 10 * F.l1_loss(back(fake), x) + 5 * F.l1_loss(there(y), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pool.append(fake.data[0:1].clone())
    old = torch.cat(pool, 0)
    return states(b, there=there, back=back) | {"judged": critic(old.detach())}


@idiom()
def a_critic_sees_condition_and_image(b: Bench) -> Found:
    """pix2pix: joined channels, hinge losses, matching of inner features."""
    make, critic = b.made(painter), b.made(lambda: judge(6), 6)
    x, y = b.images(0), b.images(1)
    inner: dict[str, torch.Tensor] = {}
    critic[2].register_forward_hook(lambda m, i, o: inner.__setitem__("now", o))
    fake = make(x)
    true = critic(torch.cat((x, y), 1))
    kept = inner["now"].detach()
    judged = critic(torch.cat((x, fake), 1))
    loss = F.relu(1 - true).mean() + F.relu(1 + judged).mean() + F.l1_loss(inner["now"], kept)
    loss.backward()
    return b.gradients(make) | {f"critic {n}": g for n, g in b.gradients(critic).items()}


@idiom()
def the_weight_of_a_critic_follows_gradients(b: Bench) -> Found:
    """VQGAN's adaptive weight: norms of gradients for the last layer."""
    make, critic = b.made(painter), b.made(judge, 6)
    x = b.images()
    fake = make(x)
    restoring, fooling = (fake - x).abs().mean(), -critic(fake).mean()
    last = make[3].weight
    first = torch.autograd.grad(restoring, last, retain_graph=True)[0]
    second = torch.autograd.grad(fooling, last, retain_graph=True)[0]
    weight = torch.clamp(torch.norm(first) / (torch.norm(second) + 1e-4), 0.0, 1e4).detach()
    (restoring + weight * fooling).backward()
    return b.gradients(make) | {"weight": weight}


@idiom()
def a_batch_is_judged_by_its_spread(b: Bench) -> Found:
    """Minibatch standard deviation (progressive GANs), noise of learned strength, pixel norm."""
    critic = b.made(lambda: judge(4))
    x = b.images()
    x = x * torch.rsqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-8)
    y = (x - x.mean(dim=0, keepdim=True)).pow(2).mean(0).add(1e-8).sqrt().mean().view(1, 1, 1, 1)
    joined = torch.cat([x, y.expand(x.size(0), 1, *x.shape[2:])], 1)
    F.softplus(critic(joined)).mean().backward()
    return b.gradients(critic)
