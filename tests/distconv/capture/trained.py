"""Training with captured steps and without, and whether both leave the same, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.capture.captured import Captured


def network(*more, bias=True, seed=1):
    """Convolutions, batch norm, ReLU and a classifier, of float32: sums in another order would give other bits."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=bias),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        *more,
        nn.Conv2d(6, 6, 3, stride=2, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def batches(grid, count, shape=(4, 2, 9, 8), seed=5):
    """So many batches of images and labels, scattered."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        images = torch.randn(shape, generator=generator)
        labels = torch.randint(3, shape[:1], generator=generator)
        found.append((dc.scatter(images, grid), dc.scatter(labels, grid, dims="n")))
    return found


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def step_of(model):
    """A step of training without the optimizer."""

    def step(x, t):
        loss = F.cross_entropy(model(x), t)
        loss.backward()
        return loss

    return step


def left(model):
    """Copies of parameters, buffers and gradients of this rank, and the state of the random generator."""
    blocks = [getattr(t, "local", t) for t in (*model.parameters(), *model.buffers())]
    grads = [None if p.grad is None else getattr(p.grad, "local", p.grad) for p in model.parameters()]
    return [None if t is None else t.detach().clone() for t in (*blocks, *grads, torch.get_rng_state())]


def equal(found, expected):
    """Whether lists of tensors, or None, are the same bit for bit."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert torch.equal(
                one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
            )


def trained(model, data, optimizer, captured, to_none=True, step_of=step_of, **options):
    """Losses of all steps, and what they have left."""
    torch.manual_seed(11)
    step, opt = step_of(model), optimizer(model.parameters())
    taken = dc.capture(step, *data[0], **options) if captured else step
    losses = []
    for batch in data:
        opt.zero_grad(set_to_none=to_none)
        losses.append(getattr(taken(*batch), "local", None))
        opt.step()
    return [*(loss.detach().clone() for loss in losses), *left(model)]


def compare(grid, build, data=None, steps=6, optimizer=sgd, **options):
    """Check that captured steps leave what eager ones do; the captured step."""
    data = data or batches(grid, steps)
    expected = trained(dc.parallelize(build(), grid), data, optimizer, False, **options)
    equal(trained(dc.parallelize(build(), grid), data, optimizer, True, **options), expected)


def recordings(step):
    """How many recordings a captured step has."""
    assert isinstance(step, Captured)
    return len(step._replays)


def both(
    grid,
    make,
    call=lambda step, x, t: step(x, t),
    between=lambda: None,
    example=None,
    around=nullcontext,
    build=network,
    **options,
):
    """What ``make(model)`` leaves in five steps, captured and not; the captured step."""
    found = []
    for captured in (False, True):
        torch.manual_seed(11)
        model, data = dc.parallelize(build(), grid), batches(grid, 5)
        optimizer, step = sgd(model.parameters()), make(model)
        with around():
            taken = dc.capture(step, *(example or (lambda *batch: batch))(*data[0]), **options) if captured else step
        kept = []
        for batch in data:
            optimizer.zero_grad()
            with around():
                kept += [y.local.detach().clone() for y in call(taken, *batch)]
            optimizer.step()
            between()
        found.append([*kept, *left(model)])
    equal(found[1], found[0])
    return taken
