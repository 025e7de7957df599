"""Autocast and GradScaler in both memory formats, against one process in the same precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.communication.transport import count_traffic

GRIDS = {2: [{"h": 2}, {"c": 2}, {"n": 2}], 3: [{"w": 3}], 4: [{"h": 2, "w": 2}, {"c": 2, "h": 2}]}
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def network(memory_format: torch.memory_format) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)),
    ).to(memory_format=memory_format)


def samples(memory_format: torch.memory_format) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(4, 4, 27, 22, generator=generator).to(memory_format=memory_format)
    return x, torch.randint(4, (4, 7, 5), generator=generator)


def gradients(
    model: nn.Module, x: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype | None, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    """Return logits, loss, and the gradients of a step, on one process."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), labels)
    (scale * loss).backward()
    found = {"logits": logits, "loss": loss, "dL/dx": x.grad / scale}
    found |= {f"dL/d{name}": parameter.grad / scale for name, parameter in model.named_parameters()}
    return {name: (dc.gather(t) if isinstance(t, dc.DistTensor) else t).detach().float() for name, t in found.items()}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the norm of all differences, each relative to the norm of the tensor."""
    return sum(float((found[n] - t).norm() / t.norm().clamp_min(1e-3)) ** 2 for n, t in expected.items()) ** 0.5


def cases(comm: Any) -> list[dc.ProcessGrid]:
    return [dc.ProcessGrid(comm, **axes) for axes in GRIDS[comm.size]]


@pytest.mark.ranks(*GRIDS)
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_differs_from_one_process_by_rounding_alone(comm: Any, dtype: torch.dtype, memory_format: str) -> None:
    order = FORMATS[memory_format]
    model, (x, labels) = network(order), samples(order)
    expected, exact = (gradients(copy.deepcopy(model), x, labels, each) for each in (dtype, None))
    for grid in cases(comm):
        split = dc.parallelize(copy.deepcopy(model), grid)
        y = dc.scatter(labels, grid, dims="nhw")
        found = gradients(split, dc.scatter(x, grid), y, dtype)
        # Sums of channels and gradients of weights are rounded on each rank, so the distance is of the order of that
        # between one process and float32.
        assert distance(found, expected) < 1.5 * distance(expected, exact) < 0.15, grid.describe()
        grid.free()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("memory_format", FORMATS)
def test_halos_are_exchanged_in_the_lower_precision(comm: Any, memory_format: str) -> None:
    grid, order = dc.ProcessGrid(comm, h=comm.size), FORMATS[memory_format]
    layer = dc.parallelize(nn.Conv2d(4, 8, 3, padding=1).to(memory_format=order), grid)
    sent = {}
    for dtype in (None, torch.bfloat16):
        x = dc.scatter(samples(order)[0], grid).requires_grad_()
        with count_traffic() as traffic:
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                y = layer(x)
            y.float().square().sum().backward()
        sent[dtype] = sum(size for what, size in traffic.sent.items() if "halo" in what)
    assert 0 < 2 * sent[torch.bfloat16] == sent[None]
    grid.free()
