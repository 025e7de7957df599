"""The memory of plain tensors taken from distributed ones, and what is made of their memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.distconv.layouts import normal
from tests.idioms.bench import COLUMNS, ROWS, SAMPLES, Bench, Found
from tests.idioms.table import idiom

SHAPE = (SAMPLES, 3, ROWS, COLUMNS)


class Centred(nn.Module):
    """Subtracts a moving average that is assigned anew at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.slope = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data = 0.9 * self.mean.data + 0.1 * x.mean((0, 2, 3))
        return (x - self.mean[None, :, None, None]) * self.slope[None, :, None, None]


@idiom(quick=True)
def data_of_a_parameter_is_assigned(b: Bench) -> Found:
    p = nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64))
    p.data = b.images() * 2
    (p * b.images(1)).sum().backward()
    return {"p": p, "dL/dp": p.grad}


@idiom(quick=True)
def a_moving_average_is_assigned_to_data_of_a_buffer(b: Bench) -> Found:
    layer = b.made(Centred)
    for seed in range(2):
        (layer(b.images(seed)) ** 2).mean().backward()
    return {"mean": layer.mean, "dL/dslope": layer.slope.grad}


@idiom()
def unused_entries_of_a_codebook_start_again(b: Bench) -> Found:
    codebook = b.made(lambda: nn.Embedding(6, 3))
    x = b.images().permute(0, 2, 3, 1).reshape(-1, 3)
    nearest = torch.cdist(x, codebook.weight).argmin(1)
    used = F.one_hot(nearest, 6).sum(0)
    codebook.weight.data = torch.where((used < 30)[:, None], x[:6].detach(), codebook.weight.data)
    (codebook(nearest) - x).pow(2).mean().backward()
    return {"weight": codebook.weight, "dL/dweight": codebook.weight.grad, "used": used}


@idiom()
def a_filter_is_made_of_patches(b: Bench) -> Found:
    conv = b.made(lambda: nn.Conv2d(3, 4, 3))
    conv.weight.data = b.images()[:4, :, :3, :3]
    conv(b.images()).sum().backward()
    return b.gradients(conv) | {"weight": conv.weight}


@idiom()
def data_of_a_gradient_is_assigned(b: Bench) -> Found:
    b.loss().backward()
    weight = b.model.first.weight
    weight.grad.data = weight.grad.data * b.images().mean()
    b.optimizer.step()
    return b.gradients() | b.state()


@idiom()
def parameters_are_made_of_one_distributed_vector(b: Bench) -> Found:
    norm = nn.BatchNorm2d(3).double()
    torch.nn.utils.vector_to_parameters(b.images().mean((0, 2, 3)).repeat(2), norm.parameters())
    return {"weight": norm.weight, "bias": norm.bias}


@idiom()
def a_plain_tensor_is_set_to_a_distributed_one(b: Bench) -> Found:
    t = torch.zeros(SHAPE, dtype=torch.float64)
    t.set_(b.images())
    return {"t": t}


@idiom()
def a_plain_tensor_changes_places_with_a_distributed_one(b: Bench) -> Found:
    t, x = torch.zeros(SHAPE, dtype=torch.float64), b.images()
    torch.utils.swap_tensors(t, x)
    return {"t": t, "x": x}


@idiom()
def parts_of_complex_numbers_are_assigned(b: Bench) -> Found:
    plain = torch.zeros(SHAPE, dtype=torch.complex128)
    plain.real, plain.imag = b.images(), b.images(1)
    x = b.images(2).requires_grad_()
    z = torch.complex(b.images(), b.images(1))
    z.real, z.imag = x * 2, normal(*SHAPE)
    z.abs().sum().backward()
    return {"plain": plain, "z": z, "dL/dx": x.grad}


@idiom(refused="the memory of a DistTensor lies on many ranks")
def a_capsule_of_dlpack_is_made(b: Bench) -> Found:
    return {"y": torch.from_dlpack(torch.utils.dlpack.to_dlpack(b.images()))}
