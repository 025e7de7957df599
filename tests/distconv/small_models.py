"""Small models that tests of parameters train, and the comparison of one with its twin on one process."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.distconv.layouts import normal

IMAGES, LABELS = normal(3, 2, 7, 9), torch.tensor([0, 2, 1])


class Convolutions(nn.Module):
    """Layers of most scenarios: a convolution, batch norm, a second convolution."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, stride=2, padding=1)

    def forward(self, x):
        return self.second(F.relu(self.norm(self.first(x))))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Convolutions(), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.adaptive_avg_pool2d(self.body(x), 1).flatten(1))


class SqueezeExcite(Pooled):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 4)

    def forward(self, x):
        y = self.body(x)
        y = y * torch.sigmoid(self.gate(y.mean((2, 3))))[:, :, None, None]
        return self.head(y.mean((2, 3)))


class Tied(Pooled):
    def __init__(self):
        super().__init__()
        self.tied = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = self.tied(self.tied(self.body(x)))
        return self.head(y.mean((2, 3))) * self.tied.weight.abs().mean()


def build(kind):
    torch.manual_seed(3)
    return kind().double()


def classify(model, x, labels):
    return F.cross_entropy(model(x), labels)


def same(found, expected, name=""):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13, msg=lambda text: f"{name}: {text}")


def compare(model, reference):
    """Check gradients, parameters and buffers, on every rank."""
    for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is None:
            assert found.grad is None, name
        else:
            torch.testing.assert_close(
                found.grad, expected.grad, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}"
            )
        same(found, expected, name)
    for found, expected in zip(model.buffers(), reference.buffers(), strict=True):
        same(found, expected)
