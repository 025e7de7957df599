"""Draws operators of complex numbers, and Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from distconv.jobs.verification.differential.draw import Draw, Program
from distconv.jobs.verification.differential.operators.programs import image, on_function

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda z: z.sum((0, -1)),
    "mean": lambda z: z.mean(),
    "conj, sum": lambda z: z.conj().sum(1),
    "conj, cumsum": lambda z: z.conj().cumsum(-1),
    "real": lambda z: z.real.flip(-1),
    "imag of conj": lambda z: z.conj().imag.roll(1, -1),
    "abs": lambda z: z.abs() + z.angle(),
    "as real": lambda z: torch.view_as_real(z).cumsum(2),
    "as complex": lambda z: torch.view_as_complex(torch.view_as_real(z) * 2),
    "adjoint": lambda z: z @ z.mH,
    "norm": lambda z: torch.linalg.vector_norm(z, dim=-1),
    "variance": lambda z: z.var(-1, correction=0),
    "linear": lambda z: F.linear(z, torch.ones(2, z.shape[-1], dtype=z.dtype)),
    "convolution": lambda z: F.conv2d(z, torch.full((2, z.shape[1], 3, 3), 0.5 - 1j, dtype=z.dtype), padding=1),
    "cat": lambda z: torch.cat([z, z.conj()], 2),
}


def function(draw: Draw) -> Program:
    """A function of an image of complex numbers."""
    name = draw.pick(*_FUNCTIONS)
    shape = (draw.number(1, 4), draw.number(1, 3), *draw.numbers(2, 1, 9))
    z = torch.complex(draw.tensor(*shape), draw.tensor(*shape))
    return on_function("complex", name, _FUNCTIONS[name], z, 2)


def fourier(draw: Draw) -> Program:
    """A transform of an image, its sizes, dimensions and norm drawn; of real and complex numbers as it takes them."""
    x = image(draw, draw.number(1, 3), draw.numbers(2, 1, 9))
    name = draw.pick("fft", "ifft", "rfft", "ihfft", "fft2", "ifft2", "rfft2", "fftn", "ifftn", "rfftn", "ihfftn")
    transform = getattr(torch.fft, name)
    several = draw.some(range(x.dim()), 4) or [2]
    dims = several if name[-1] in "2n" else several[0]
    sizes = draw.pick(None, [draw.number(1, 9) for _ in several] if name[-1] in "2n" else draw.number(1, 9))
    norm = draw.pick(None, "forward", "ortho")

    def both(t: torch.Tensor) -> torch.Tensor:
        y = transform(t, sizes, dims, norm)
        return torch.cat([y.real, y.imag], 1)

    return on_function("fourier", f"{name} {sizes} {dims} {norm}", both, x, 2)
