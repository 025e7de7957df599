"""Training with captured steps and without, and whether both leave the same, bit for bit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import distconv as dc
from distconv.capture.captured import Captured
from tests.distconv.layouts import grids


def network(*more, bias=True, seed=1):
    """Convolutions, batch norm, ReLU and a classifier, of float32: sums in another order would give other bits."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=bias),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        *more,
        nn.Conv2d(6, 6, 3, stride=2, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def batches(grid, count, shape=(4, 2, 9, 8), seed=5, device="cpu"):
    """So many batches of images and labels, scattered."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        images = torch.randn(shape, generator=generator).to(device)
        labels = torch.randint(3, shape[:1], generator=generator).to(device)
        found.append((dc.scatter(images, grid), dc.scatter(labels, grid, dims="n")))
    return found


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def make_step(model, loss_of=F.cross_entropy):
    """A step of training without the optimizer."""

    def step(x, t):
        loss = loss_of(model(x), t)
        loss.backward()
        return loss

    return step


def capture_one_step(comm, axes="nh", **options):
    """The first grid of these axes, a model on it, a batch, and the captured step of the model."""
    grid = grids(comm, axes)[0]
    (batch,), model = batches(grid, 1), dc.parallelize(network(), grid)
    return grid, model, batch, dc.capture(make_step(model), *batch, **options)


def block_of(tensor):
    return getattr(tensor, "local", tensor)


def training_state(model):
    """Copies of parameters, buffers and gradients of this rank, and the states of the random generators."""
    parameters = [*model.parameters()]
    tensors = [*parameters, *model.buffers(), *(p.grad for p in parameters), torch.get_rng_state()]
    tensors += torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [None if t is None else block_of(t).detach().clone() for t in tensors]


def assert_equal(found, expected):
    """Return True if lists of tensors, or None, are bitwise identical."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert torch.equal(
                one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
            )


def recordings(step):
    """How many recordings a captured step has."""
    assert isinstance(step, Captured)
    return len(step._replays)


def compare(
    grid,
    build=network,
    data=None,
    steps=4,
    make=make_step,
    optimizer=sgd,
    to_none=True,
    call=lambda step, *batch: step(*batch),
    example=lambda *batch: batch,
    plan=None,
    **options,
):
    """Check that ``make(model)`` returns and leaves the same, captured and not, in all steps; the captured step."""
    data, found = data or batches(grid, steps), []
    for captured in (False, True):
        torch.manual_seed(11)
        model = dc.parallelize(build(), plan or grid)
        opt, step, kept = optimizer(model.parameters()), make(model), []
        taken = dc.capture(step, *example(*data[0]), **options) if captured else step
        for batch in data:
            opt.zero_grad(set_to_none=to_none)
            results = tree_leaves(call(taken, *batch))
            kept += [block_of(each).detach().clone() for each in results if isinstance(each, torch.Tensor)]
            opt.step()
        found.append([*kept, *training_state(model)])
    assert_equal(found[1], found[0])
    return taken
