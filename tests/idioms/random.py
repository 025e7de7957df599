"""Random numbers: the same as in one process, whoever holds them."""

from __future__ import annotations

import random as python
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


def through(b: Bench, draw: Callable[[torch.Tensor], torch.Tensor]) -> Found:
    """``draw(x)`` of features that gradients flow through, and one more number, which shows what was drawn."""
    x = b.model.begin(b.images())
    torch.manual_seed(6)
    y = draw(x)
    last = torch.rand(3)
    (y * y).sum().backward()
    return b.gradients() | {"y": y, "last": last}


@idiom(quick=True)
def tokens_are_dropped_after_a_transpose(b: Bench) -> Found:
    return through(b, lambda x: F.dropout(x.flatten(2).transpose(1, 2), 0.3))


@idiom()
def noise_is_added_to_features(b: Bench) -> Found:
    return through(b, lambda x: x + 0.1 * torch.randn_like(x) + x.new_empty(x.shape).normal_(0, 0.1))


@idiom()
def noise_of_a_plain_shape_is_added(b: Bench) -> Found:
    return through(b, lambda x: x + 0.1 * torch.randn(x.shape, dtype=x.dtype) + torch.rand(x.size(0), 1, 1, 1).double())


@idiom()
def a_latent_is_drawn_by_its_mean_and_variance(b: Bench) -> Found:
    """The reparameterization trick."""

    def draw(x: torch.Tensor) -> torch.Tensor:
        mean, log_var = x[:, :6].chunk(2, dim=1)
        std = torch.exp(0.5 * log_var)
        return mean + torch.randn_like(std) * std - 0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).mean()

    return through(b, draw)


@idiom()
def gumbel_noise_makes_choices(b: Bench) -> Found:
    return through(b, lambda x: F.gumbel_softmax(x, tau=0.7, hard=True, dim=1) * x + F.gumbel_softmax(x, dim=3))


@idiom()
def classes_are_drawn_from_probabilities(b: Bench) -> Found:
    def draw(x: torch.Tensor) -> torch.Tensor:
        p = x.mean((2, 3)).softmax(1)
        drawn = torch.multinomial(p, 3, replacement=True)
        return p.gather(1, drawn) * torch.bernoulli(p[:, :3])

    return through(b, draw)


@idiom()
def patches_are_masked_at_random(b: Bench) -> Found:
    """Masked autoencoders: a random order for each sample, kept and restored."""

    def draw(x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        n, length, width = tokens.shape
        order = torch.argsort(torch.rand(n, length), dim=1)
        back = torch.argsort(order, dim=1)
        kept = torch.gather(tokens, 1, order[:, :20].unsqueeze(-1).repeat(1, 1, width))
        blank = torch.zeros(1, 1, width, dtype=x.dtype)
        filled = torch.cat([kept * 2, blank.expand(n, length - 20, -1)], dim=1)
        return torch.gather(filled, 1, back[..., None].expand(-1, -1, width))

    return through(b, draw)


@idiom()
def samples_are_permuted(b: Bench) -> Found:
    def draw(x: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(x.size(0), device=x.device)
        return 0.7 * x + 0.3 * x[order]

    return through(b, draw)


@idiom()
def all_dropouts_of_torch(b: Bench) -> Found:
    def draw(x: torch.Tensor) -> torch.Tensor:
        x = F.feature_alpha_dropout(F.dropout1d(F.dropout2d(x, 0.2).flatten(2), 0.2).view_as(x), 0.2, True)
        return F.alpha_dropout(F.dropout3d(x.unsqueeze(2), 0.2).squeeze(2), 0.1, True) + F.rrelu(x, training=True)

    return through(b, draw)


@idiom()
def a_generator_of_ones_own_draws(b: Bench) -> Found:
    def draw(x: torch.Tensor) -> torch.Tensor:
        g = torch.Generator().manual_seed(11)
        noise = torch.empty_like(x).uniform_(-1, 1, generator=g)
        return x * (1 + 0.1 * noise) + torch.bernoulli(torch.full_like(x, 0.4), generator=g)

    return through(b, draw)


@idiom()
def states_of_generators_are_saved_and_restored(b: Bench) -> Found:
    def draw(x: torch.Tensor) -> torch.Tensor:
        before = torch.get_rng_state()
        first = F.dropout(x, 0.5)
        torch.set_rng_state(before)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            other = torch.rand_like(x)
        return first - F.dropout(x, 0.5) + other * x

    return through(b, draw)


@idiom()
def layers_are_skipped_by_pythons_random(b: Bench) -> Found:
    python.seed(4)
    x = b.model.begin(b.images())
    for _ in range(4):
        if python.random() < 0.5:
            x = F.avg_pool2d(x, 3, 1, 1)
    x.square().mean().backward()
    return b.gradients()


@idiom()
def layers_are_skipped_by_torchs_random(b: Bench) -> Found:
    def draw(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            if torch.rand(1).item() < 0.5 or torch.randint(0, 10, (1,)) > 8:
                x = F.avg_pool2d(x, 3, 1, 1)
        return x

    return through(b, draw)


@idiom()
def many_draws_in_place(b: Bench) -> Found:
    def draw(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        drawn = [
            y.clone().exponential_(2.0), y.clone().log_normal_(0, 0.5), y.clone().cauchy_().clamp(-3, 3),
            y.clone().geometric_(0.4), y.clone().random_(0, 5), torch.randint_like(x, 3), torch.poisson(x.detach()),
            torch.normal(x.detach(), 0.1), torch.rand_like(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        ]  # fmt: skip
        return x * torch.stack(drawn).sum(0)

    return through(b, draw)


@idiom()
def evaluation_draws_nothing(b: Bench) -> Found:
    net = b.made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Dropout2d(0.5)))
    return {"y": net.eval()(b.images()), "last": torch.rand(2)}


@idiom()
def dropout_stays_on_for_uncertainty(b: Bench) -> Found:
    """Monte Carlo dropout."""
    net = b.made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)))
    net.eval()
    for m in net.modules():
        if isinstance(m, nn.Dropout):
            m.train()
    with torch.no_grad():
        drawn = torch.stack([net(b.images()).softmax(1) for _ in range(4)])
    mean = drawn.mean(0)
    return {"std": drawn.std(0), "entropy": -(mean * mean.log()).sum(1)}
