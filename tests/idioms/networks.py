"""Networks that combine operators as published ones do, trained for a step or two."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributions as td
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


def states(b: Bench, **modules: Any) -> Found:
    return {f"{m} {n}": t for m, module in modules.items() for n, t in b.state(module).items()}


@idiom
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


def trained(b: Bench, make: Callable[[], nn.Module], channels: int = 8) -> Found:
    """Two steps of a layer between two convolutions: its results, weights and buffers."""
    net = b.made(lambda: nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), make(), nn.AdaptiveAvgPool2d(2)))
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    torch.manual_seed(4)
    for seed in range(2):
        y = net(b.images(seed))
        optimizer.zero_grad()
        (y * y).mean().backward()
        optimizer.step()
    return b.state(net) | {"y": y}


class Layer(nn.Module):
    """A layer made of weights by name and a function of them and the features."""

    def __init__(self, function: Callable[..., torch.Tensor], **parts: nn.Module | torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


@idiom
def experts_are_routed_by_their_scores(b: Bench) -> Found:
    def route(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        tokens = x.permute(0, 2, 3, 1).reshape(-1, 8)
        weights, chosen = m.router(tokens).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(m.experts):
            rows, slot = torch.where(chosen == index)
            out[rows] += weights[rows, slot, None] * expert(tokens[rows])
        return out.view(x.size(0), *x.shape[2:], 8).permute(0, 3, 1, 2)

    return trained(
        b, lambda: Layer(route, router=nn.Linear(8, 3), experts=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)))
    )


@idiom
def layers_made_by_torch_in_one_row(b: Bench) -> Found:
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(8, 8, 3, padding="same", padding_mode="reflect", groups=4), nn.GroupNorm(2, 8), nn.PReLU(8),
        nn.ReplicationPad2d(1), nn.LPPool2d(2, 2, 1), nn.InstanceNorm2d(8, affine=True), nn.GELU("tanh"),
        nn.Dropout2d(0.2), nn.ConvTranspose2d(8, 8, 3, 2, 1, 1, groups=2), nn.RMSNorm([16, 20]), nn.Hardswish(),
        nn.Upsample(scale_factor=0.5), nn.Softmax2d(), nn.LocalResponseNorm(3), nn.FractionalMaxPool2d(2, (5, 5)),
    )  # fmt: skip
    return trained(b, make)


@idiom
def windows_shifted_by_rolls(b: Bench) -> Found:
    """Swin: pad, roll, partition, attend with a table of biases and a mask, and all of it back."""

    def attend(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        x = F.pad(x.permute(0, 2, 3, 1), (0, 0, 0, 3, 0, 1)).roll((-2, -2), (1, 2))
        windows = x.view(n, 2, 4, 3, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        q, k, v = m.qkv(windows).view(-1, 16, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        place = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        apart = place[:, :, None] - place[:, None, :] + 3
        bias = m.table[(apart[0] * 7 + apart[1]).view(-1)].view(16, 16, 2).permute(2, 0, 1)
        scores = q @ k.transpose(-2, -1) + bias.unsqueeze(0)
        region = torch.zeros(1, 8, 12, 1)
        region[:, -4:-2], region[:, -2:], region[:, :, -2:] = 1, 2, 3
        region = region.view(1, 2, 4, 3, 4, 1).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16)
        mask = (region[:, None] != region[:, :, None]).double() * -100.0
        scores = (scores.view(n, 6, 2, 16, 16) + mask.view(1, 6, 1, 16, 16)).view(-1, 2, 16, 16)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 16, c)
        y = y.view(n, 2, 3, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(n, 8, 12, c).roll((2, 2), (1, 2))
        return y[:, :h, :w].permute(0, 3, 1, 2).contiguous()

    return trained(b, lambda: Layer(attend, qkv=nn.Linear(8, 24), table=0.1 * normal(49, 2)))


def features(b: Bench) -> torch.Tensor:
    return b.model.begin(b.images()) + b.model.first.weight.mean()


@idiom
def a_variational_autoencoder_is_a_normal_distribution(b: Bench) -> Found:
    torch.manual_seed(2)
    mean, log = features(b)[:, :6].chunk(2, 1)
    posterior = td.Normal(mean, log.exp())
    prior = td.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    z = posterior.rsample()
    loss = td.kl_divergence(posterior, prior).sum((1, 2, 3)).mean() - posterior.log_prob(z).mean()
    (loss + z.square().mean()).backward()
    return b.gradients() | {"z": z, "entropy": posterior.entropy().mean()}


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


@idiom
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
