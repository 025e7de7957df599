"""Networks that do what ``torch.fx`` cannot follow, or not faithfully; each takes (N, 4, 6, 6), cut in three."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.pipeline.splitting.modules import model_of

SHAPE = (4, 6, 6)


def convolutions(count=3, **more):
    return {name: nn.Conv2d(4, 4, 3, padding=1) for name in "abcde"[:count]} | more


def _number_of_dimensions(self, x):
    x = self.a(x)
    if len(x.shape) == 4 and x.dim() == x.ndim:
        x = x * 2
    return self.c(F.relu(self.b(x)))


def _heads(self, x):
    x = self.a(x)
    n, c, h, w = x.size()
    q, k, v = self.b(x).reshape(n, 3, 2, c // 2, h * w).unbind(1)
    attention = (q.transpose(-1, -2) @ k / (c // 2) ** 0.5).softmax(-1)
    return self.c((attention @ v.transpose(-1, -2)).transpose(-1, -2).reshape(x.shape))


def _modules_on_the_fly(self, x):
    x = nn.Upsample(scale_factor=2, mode="nearest")(self.a(x))
    x = nn.Sequential(nn.ReLU(), nn.Dropout(0.3))(self.b(x))
    return nn.AdaptiveAvgPool2d(3)(self.c(x))


def _decided_by_the_batch(self, x):
    x = self.a(x)
    if x.shape[0] > 2:
        x = x * 3
    groups = min(2, x.shape[0])
    x = self.b(x).view(groups, -1) if x.shape[0] % groups == 0 else self.b(x).flatten(1)
    return self.c(x.view(-1, 4, 6, 6))


def _functional_dropout(self, x):
    x = F.dropout(self.a(x), 0.4, self.training)
    x = F.dropout2d(self.b(x), 0.4, training=self.training)
    return self.c(x)


def _random_draws(self, x):
    keep = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.7)
    x = self.a(x) * keep
    return self.c(self.b(x) + torch.rand(4, 1, 1)) + torch.randn_like(x)


def _other_ways_in_evaluation(self, x):
    x = self.b(self.a(x))
    if self.training:
        x = self.d(x) + self.d.bias.mean()
    return self.c(x)


class _OwnNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


def _batch_norms(self, x):
    x = self.norm(self.a(x)) if len(x.shape) == 4 else x
    x = F.batch_norm(self.b(x), self.mean, self.variance, training=self.training)
    return self.c(x)


def _in_place(self, x):
    x = F.leaky_relu_(self.a(x))
    x = x * 2
    x[:, 0] *= 2
    x = self.b(x + len(x.shape))
    x += 1
    x.mul_(0.5).clamp_(min=-1)
    y = self.c(x)
    y[:, 1:, ::2] = 0.25
    return y


def _moving_average(self, x):
    x = self.a(x)
    if self.training:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean((0, 2, 3)), alpha=0.1)
            self.count += 1
    return self.c(self.b(x - self.average[:, None, None].detach()) * len(x.shape))


def _without_gradient(self, x):
    x = self.a(x)
    with torch.no_grad():
        target = self.d(x).tanh()
    return self.c(self.b(x) + x.detach() * target)


class _Square(torch.autograd.Function):
    """x^2 with a gradient of its own."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] * ctx.factor, None


def _own_function(self, x):
    return self.c(_Square.apply(self.b(_Square.apply(self.a(x), 3.0)), 1.5))


def _checkpointed(self, x):
    x = checkpoint(lambda v: F.dropout(self.a(v), 0.3, self.training), x, use_reentrant=False)
    return self.c(checkpoint(self.b, x, use_reentrant=False)) * x.dim()


def _checkpointed_reentrant(self, x):
    x = checkpoint(lambda v: F.relu(v), self.a(x), use_reentrant=True)
    return self.c(checkpoint(self.b, x, use_reentrant=True)) * len(x.shape)


def _unpacked(self, x):
    n = x.shape[0]
    first, *rest = self.a(x).transpose(0, 1)
    x = torch.stack([first, *[row * 2 for row in rest]], 1)
    values, places = self.b(x).max(1, keepdim=True)
    return self.c(x + values) + places.view(n, 1, 6, 6)


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x, *, scale=None, others=()):
        found = {"y": self.layer(x), "rest": [x * scale, *others]}
        return found if isinstance(x, torch.Tensor) else None


def _containers_and_keywords(self, x):
    found = self.a(x, scale=2.0)
    found = self.b(found["y"], scale=found["rest"][0].mean(), others=found["rest"])
    return {"out": self.c(found["y"], scale=1.0)["y"], "sums": (sum(found["rest"]), len(found["rest"]))}


def _called_twice(self, x):
    x = self.d(self.d(self.a(x)))
    y = self.b(x)
    return self.c(y) * F.conv2d(y, self.c.weight, padding=1) * len(x.shape)


def _constants(self, x):
    x = self.a(x) + torch.arange(6, dtype=x.dtype, device=x.device)
    x = self.b(x) * self.plain + self.several[0]
    return self.c(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None, None] * x.ndim


def _with_constants():
    made = model_of(_constants, **convolutions())
    made.plain, made.several = torch.rand(6, 1), [torch.rand(6), 2]
    return made


def _gradient_hook(self, x):
    x = self.a(x) * len(x.shape)
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.5)
    return self.c(self.b(x))


def _parametrized():
    made = model_of(_number_of_dimensions, **convolutions())
    nn.utils.parametrizations.weight_norm(made.a)
    nn.utils.spectral_norm(made.b)
    return made


def make_model(forward, count=3, **more):
    return lambda: model_of(forward, **convolutions(count, **more))


IDIOMS = {
    "number of dimensions": make_model(_number_of_dimensions),
    "heads": lambda: model_of(_heads, a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 12, 1), c=nn.Conv2d(4, 2, 3)),
    "modules on the fly": make_model(_modules_on_the_fly),
    "decided by the batch": make_model(_decided_by_the_batch),
    "functional dropout": make_model(_functional_dropout),
    "random draws": make_model(_random_draws),
    "other ways in evaluation": make_model(_other_ways_in_evaluation, 4),
    "batch norms": lambda: model_of(
        _batch_norms, **convolutions(), norm=_OwnNorm(4), mean=torch.zeros(4), variance=torch.ones(4)
    ),
    "in place": make_model(_in_place),
    "a moving average": lambda: model_of(
        _moving_average, **convolutions(), average=torch.zeros(4), count=torch.tensor(0)
    ),
    "without gradient": make_model(_without_gradient, 4),
    "an own function": make_model(_own_function),
    "checkpointed": make_model(_checkpointed),
    "checkpointed, reentrant": make_model(_checkpointed_reentrant),
    "unpacked": make_model(_unpacked),
    "containers and keywords": lambda: model_of(_containers_and_keywords, a=_Block(), b=_Block(), c=_Block()),
    "called twice": make_model(_called_twice, 4),
    "constants": _with_constants,
    "a gradient hook": make_model(_gradient_hook),
    "parametrized": _parametrized,
}
"""Makers of networks by the feature that they have. Cuts are ``b`` and ``c``."""
