"""Complex tensors in all kinds of communication, and their real and imaginary parts, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import grid_over, normal
from tests.layers.compare import close
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 2, 7, 6)

KERNEL = torch.complex(normal(4, 2, 3, 3, seed=2), normal(4, 2, 3, 3, seed=3))

FUNCTIONS = {
    "sum": lambda z: z.sum((0, 2)),
    "sum of everything": lambda z: z.sum(),
    "mean": lambda z: z.mean((1, 3)),
    "product": lambda z: z.prod(2),
    "variance": lambda z: z.var((0, 3)),
    "deviation": lambda z: torch.std(z),
    "norm": lambda z: torch.linalg.vector_norm(z, dim=(0, 2)),
    "cumsum": lambda z: z.cumsum(2),
    "conjugate": lambda z: z.conj().cumsum(0),
    "conjugate, summed": lambda z: z.conj().sum(2),
    "conjugate, resolved": lambda z: z.conj().resolve_conj() * z,
    "real": lambda z: z.real.flip(2),
    "imag": lambda z: torch.imag(z).sum(0),
    "imag of a conjugate": lambda z: z.conj().imag.cumsum(3),
    "abs and angle": lambda z: torch.polar(z.abs(), z.angle()),
    "complex": lambda z: torch.complex(z.imag, z.real),
    "view_as_real": lambda z: torch.view_as_real(z).roll(1, 2),
    "view_as_complex": lambda z: torch.view_as_complex(torch.relu(torch.view_as_real(z))),
    "adjoint": lambda z: z.mH @ z,
    "adjoint of a matrix": lambda z: z[0, 0].H + z[1, 1].adjoint(),
    "matrices": lambda z: torch.einsum("nchw,ndhw->ncd", z, z.conj()),
    "vdot": lambda z: torch.vdot(z[0, 0, :, 0], z[1, 0, :, 1]),
    "where": lambda z: torch.where(z.real > 0, z, z.conj()),
    "cat": lambda z: torch.cat([z, z.conj()], 2),
    "convolution": lambda z: F.conv2d(z, KERNEL, torch.complex(normal(4), normal(4, seed=1)), padding=1),
    "convolution with stride": lambda z: F.conv2d(z, KERNEL, stride=2),
    "logsumexp": lambda z: torch.logsumexp(z, 2),
    "number": lambda z: z * complex(z[0, 0, 0, 0].detach()),
    "division": lambda z: z / (z * z.conj() + 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@UP_TO_FOUR_RANKS
def test_functions_of_complex_numbers_equal_one_process(comm, name):
    whole = torch.complex(normal(*SHAPE), normal(*SHAPE, seed=1)).requires_grad_()
    expected = FUNCTIONS[name](whole)
    gradient = normal(*expected.shape, seed=17).to(expected.dtype)
    (of_one,) = torch.autograd.grad(expected, whole, gradient)
    for dist in uneven_layouts(comm, SHAPE):
        z = dc.scatter(whole.detach(), dist).requires_grad_()
        found = FUNCTIONS[name](z)
        close(dc.gather(found.detach()), expected.detach(), f"y on {dist}")
        found.backward(gradient)
        close(dc.gather(z.grad), of_one, f"gradient on {dist}")


def test_a_view_of_the_parts_shares_memory(comm):
    z = dc.scatter(torch.zeros(2, 3, 5, 4, dtype=torch.complex128), grid_over(comm, h=comm.size))
    torch.view_as_real(z)[..., 0] = 2
    z.imag.fill_(3)
    assert torch.equal(dc.gather(z), torch.full((2, 3, 5, 4), 2 + 3j, dtype=torch.complex128))


def test_complex_parameters_learn_as_in_one_process(comm):
    def trained(grid):
        w = torch.nn.Parameter(torch.complex(normal(2, 1, 1), normal(2, 1, 1, seed=1)))
        z = torch.complex(normal(*SHAPE), normal(*SHAPE, seed=1))
        optimizer = torch.optim.Adam([w], 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            ((z if grid is None else dc.scatter(z, grid)) * w - 1).abs().square().mean().backward()
            optimizer.step()
        return w.detach()

    for axis in "nchw":
        close(trained(grid_over(comm, **{axis: comm.size})), trained(None), axis)
