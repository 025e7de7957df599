"""Stale weights by recursion over versions, without queues, an order of passes, or autograd."""

from __future__ import annotations

from functools import cache

import torch

WIDTH, RATE, MOMENTUM = 3, 0.1, 0.9


def in_flight(schedule, stages, stage):
    return 2 * (stages - stage) - 1 if schedule == "stale" else stages - stage


class Definition:
    """Weights of every version of every stage, by recursion: no queue, no order of passes, and no autograd.

    A stage is ``two_layers``: y = W2 tanh(W1 x + b1) + b2, with weights (W1, b1, W2, b2). A pass is ("F" or "B", stage,
    mini-batch). ``versions(pass)`` is the version that its weights have; below the newest one or the newest is looked
    up, above it is extrapolated.
    """

    def __init__(self, stages, batches, schedule, weights, vertical_sync=False):
        self.first = [[p.detach().clone() for p in stage.parameters()] for stage in stages]
        self.count, self.batches = len(stages), batches
        self.weights, self.schedule, self.vertical_sync = weights, schedule, vertical_sync
        for name in ("version", "momentum", "activations", "gradients"):
            setattr(self, name, cache(getattr(self, name)))

    def at_forward(self, stage, m):
        return max(0, m - in_flight(self.schedule, self.count, stage) + 1)

    def used(self, stage, m, newest):
        if self.weights == "predict":
            now, target = self.version(stage, newest), m + stage // 2
            if newest == 0:
                return now
            delta = [a - b for a, b in zip(now, self.version(stage, newest - 1), strict=True)]
            return [w + (target - newest) * d for w, d in zip(now, delta, strict=True)]
        if self.weights == "stash":
            return self.version(stage, self.at_forward(0 if self.vertical_sync else stage, m))
        return self.version(stage, newest)

    def version(self, stage, number):
        if number == 0:
            return self.first[stage]
        momentum = self.momentum(stage, number - 1)
        return [w - RATE * v for w, v in zip(self.version(stage, number - 1), momentum, strict=True)]

    def momentum(self, stage, m):
        gradients = self.gradients(stage, m)[:4]
        if m == 0:
            return gradients
        return [MOMENTUM * v + g for v, g in zip(self.momentum(stage, m - 1), gradients, strict=True)]

    def activations(self, stage, m):
        """Input, hidden values and output, as the forward sees them."""
        x = self.activations(stage - 1, m)[2] if stage else self.batches[m][0]
        return layers(x, self.used(stage, m, self.at_forward(stage, m)))

    def gradients(self, stage, m):
        """dW1, db1, dW2, db2, dx."""
        w1, b1, w2, b2 = self.used(stage, m, m)
        x, h, y = self.activations(stage, m)
        if self.weights == "recompute":
            x, h, y = layers(x, [w1, b1, w2, b2])
        if stage == self.count - 1:
            dy = 2 * (y - self.batches[m][1]) / y.numel()
        else:
            dy = self.gradients(stage + 1, m)[4]
        dz = (dy @ w2) * (1 - h * h)
        return [dz.T @ x, dz.sum(0), dy.T @ h, dy.sum(0), dz @ w1]


def layers(x, weights):
    w1, b1, w2, b2 = weights
    h = torch.tanh(x @ w1.T + b1)
    return x, h, h @ w2.T + b2
