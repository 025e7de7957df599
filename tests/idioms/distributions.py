"""torch.distributions of distributed parameters."""

from __future__ import annotations

import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import nn

from tests.distconv.layouts import normal
from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


def features(b: Bench) -> torch.Tensor:
    return b.model.begin(b.images()) + b.model.first.weight.mean()


@idiom(quick=True)
def a_variational_autoencoder_is_a_normal_distribution(b: Bench) -> Found:
    torch.manual_seed(2)
    mean, log = features(b)[:, :6].chunk(2, 1)
    posterior = td.Normal(mean, log.exp())
    prior = td.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    z = posterior.rsample()
    loss = td.kl_divergence(posterior, prior).sum((1, 2, 3)).mean() - posterior.log_prob(z).mean()
    (loss + z.square().mean()).backward()
    return b.gradients() | {"z": z, "entropy": posterior.entropy().mean()}


@idiom()
def the_standard_normal_is_plain(b: Bench) -> Found:
    mean = features(b)
    loss = td.kl_divergence(td.Normal(mean, torch.ones_like(mean) * 0.5), td.Normal(0.0, 1.0)).mean()
    loss = loss - td.Independent(td.Normal(mean, 1.0), 3).log_prob(mean * 0.5).mean()
    loss.backward()
    return b.gradients() | {"loss": loss}


@idiom()
def a_policy_draws_actions(b: Bench) -> Found:
    """REINFORCE, and the clipped objective of PPO."""
    torch.manual_seed(3)
    policy = td.Categorical(logits=b.model(b.images()))
    action = policy.sample()
    reward = normal(5, seed=2)
    logs = policy.log_prob(action)
    ratio = torch.exp(logs - logs.detach() * 1.1)
    clipped = torch.min(ratio * reward, ratio.clamp(0.8, 1.2) * reward).mean()
    (-(logs * reward).mean() - clipped - 0.01 * policy.entropy().mean()).backward()
    return b.gradients() | {"action": action}


@idiom()
def pixels_are_bernoulli(b: Bench) -> Found:
    x = features(b)
    pixels = td.Bernoulli(logits=x)
    torch.manual_seed(3)
    drawn = pixels.sample()
    (
        -pixels.log_prob(drawn).mean() + td.RelaxedBernoulli(torch.tensor(0.5).double(), logits=x).rsample().mean()
    ).backward()
    return b.gradients() | {"drawn": drawn, "mean": pixels.mean}


@idiom()
def densities_of_several_kinds(b: Bench) -> Found:
    x = features(b)
    positive = F.softplus(x) + 0.5
    loss = (
        td.Laplace(x, positive).log_prob(x * 0.3).mean() + td.Gamma(positive, positive).log_prob(positive * 2).mean()
        + td.Beta(positive, positive).log_prob(torch.sigmoid(x)).mean() + td.StudentT(3.0, x,
            positive).log_prob(x + 1).mean()
        + td.LogNormal(x, positive).log_prob(positive).mean() + td.Uniform(x - 1, x + 1).log_prob(x).mean()
        + td.Cauchy(x, positive).log_prob(x * 2).mean() + td.Poisson(positive).log_prob(torch.ones_like(x)).mean()
    )  # fmt: skip
    loss.backward()
    return b.gradients() | {"loss": loss}


@idiom()
def draws_that_gradients_pass(b: Bench) -> Found:
    x = features(b)
    positive = F.softplus(x) + 0.5
    torch.manual_seed(7)
    drawn = (
        td.Laplace(x, positive).rsample() + td.Gamma(positive, positive).rsample() + td.Uniform(x - 1, x + 1).rsample()
        + td.LogNormal(x * 0.1, 0.1).rsample() + td.Gumbel(x, 1.0).rsample() + td.HalfNormal(positive).rsample()
    )  # fmt: skip
    drawn.square().mean().backward()
    return b.gradients() | {"drawn": drawn}


@idiom()
def a_mixture_predicts_pixels(b: Bench) -> Found:
    x = features(b)[:, :6].permute(0, 2, 3, 1)
    mixture = td.MixtureSameFamily(
        td.Categorical(logits=x[..., :3]), td.Normal(x[..., 3:], torch.ones_like(x[..., 3:]))
    )
    (-mixture.log_prob(normal(5, 7, 9, seed=5)).mean()).backward()
    return b.gradients() | {"mean": mixture.mean}


@idiom()
def a_gaussian_with_a_full_covariance(b: Bench) -> Found:
    net = b.made(lambda: nn.Linear(5, 9))
    y = net(b.model(b.images()))
    factor = torch.diag_embed(F.softplus(y[:, 3:6]) + 0.1)
    factor = factor + torch.tril(y[:, 6:, None] * torch.ones(3).double(), -1)
    torch.manual_seed(1)
    gaussian = td.MultivariateNormal(y[:, :3], scale_tril=factor)
    (-gaussian.log_prob(y[:, :3] * 0.5 + 1) + gaussian.rsample().square().sum(1)).mean().backward()
    return b.gradients() | b.gradients(net)


@idiom()
def shares_of_mixed_samples_are_drawn(b: Bench) -> Found:
    torch.manual_seed(4)
    share = td.Beta(torch.tensor(0.4), torch.tensor(0.4)).sample((5,)).double().view(-1, 1, 1, 1)
    x = b.images()
    F.cross_entropy(b.model(share * x + (1 - share) * x.flip(0)), b.labels()).backward()
    return b.gradients()


@idiom()
def a_flow_transforms_a_distribution(b: Bench) -> Found:
    """RealNVP's affine coupling with its log-determinant, squashed at the end."""
    net = b.made(lambda: nn.Conv2d(3, 8, 3, padding=1))
    x = b.images(0)
    kept, moved = torch.cat([x, x[:, :1]], 1)[:, :3], b.images(1, 4)
    scale, shift = net(kept).chunk(2, 1)
    scale = torch.tanh(scale)
    z = moved * scale.exp() + shift
    logs = scale.flatten(1).sum(1) + td.Normal(0.0, 1.0).log_prob(z).sum((1, 2, 3))
    squashed = td.TransformedDistribution(td.Normal(shift, 1.0), [td.TanhTransform(cache_size=1)])
    torch.manual_seed(5)
    action = squashed.rsample()
    (-logs.mean() - squashed.log_prob(action).mean()).backward()
    return b.gradients(net) | {"logs": logs}
