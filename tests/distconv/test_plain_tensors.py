"""Plain tensors that are given a distributed one, or made of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, normal, raises_everywhere


def _images(comm: Any) -> dc.DistTensor:
    return dc.scatter(normal(5, 3, 7, 9), grid_over(comm, h=comm.size))


@pytest.mark.fault(90)
@pytest.mark.usefixtures("fallback")
@pytest.mark.ranks(2, 3)
def test_data_assigned_to_a_plain_tensor_is_the_whole_and_warned_about(comm: Any) -> None:
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    with pytest.warns(dc.ReplicationWarning, match=r"data of a plain tensor.*new_zeros"):
        p.data = _images(comm)
    assert type(p.data) is torch.Tensor
    assert torch.equal(p + 1, normal(5, 3, 7, 9) + 1)


@pytest.mark.fault(90)
@pytest.mark.ranks(2)
def test_data_assigned_to_a_plain_tensor_is_refused_where_nothing_is_gathered(comm: Any) -> None:
    p = torch.zeros(1)
    raises_everywhere(
        comm, dc.UnsupportedOperation, "data of a plain tensor", lambda: setattr(p, "data", _images(comm))
    )
    assert torch.equal(p, torch.zeros(1))


@pytest.mark.usefixtures("fallback")
@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
@pytest.mark.ranks(2, 3)
def test_memory_and_parts_of_a_plain_tensor_become_the_full_values(comm: Any) -> None:
    t, z = torch.zeros(5, 3, 7, 9, dtype=torch.float64), torch.zeros(5, 3, 7, 9, dtype=torch.complex128)
    assert type(t.set_(_images(comm))) is torch.Tensor
    assert torch.equal(t, normal(5, 3, 7, 9))
    z.real, z.imag = _images(comm), _images(comm) * 2
    assert torch.equal(z, torch.complex(normal(5, 3, 7, 9), normal(5, 3, 7, 9) * 2))


@pytest.mark.ranks(2, 3)
def test_parts_of_a_distributed_complex_tensor_are_assigned_with_their_gradients(comm: Any) -> None:
    z = torch.complex(_images(comm), _images(comm))
    x = (_images(comm) * 3).requires_grad_()
    z.real, z.imag = x * 2, normal(5, 3, 7, 9)
    assert torch.equal(dc.gather(z.detach()), torch.complex(normal(5, 3, 7, 9) * 6, normal(5, 3, 7, 9)))
    (z.real**2).sum().backward()
    torch.testing.assert_close(dc.gather(x.grad), 24 * normal(5, 3, 7, 9))


def test_plain_tensors_keep_torchs_own_attributes() -> None:
    for name in ("data", "real", "imag"):
        assert getattr(torch.Tensor, name) is vars(torch._C.TensorBase)[name]
    z = torch.zeros(2, dtype=torch.complex128)
    z.real, z.imag = 1.0, torch.ones(2)
    z.data = z.data * 2
    assert torch.equal(z, torch.full((2,), 2 + 2j, dtype=torch.complex128))
    with pytest.raises(RuntimeError, match="Deleting tensor data"):
        del z.data


def _capsule(x: torch.Tensor) -> Any:
    return torch.utils.dlpack.to_dlpack(x)


@pytest.mark.fault(91)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (_capsule, "the memory of a DistTensor lies on many ranks"),
        (lambda x: torch.to_dlpack(x), "the memory of a DistTensor lies on many ranks"),
        (torch.tensor, r"torch\.tensor\(x\).*use x\.detach\(\)\.clone\(\)"),
        (torch.zeros(1).new_tensor, r"new_tensor\(x\).*use x\.detach\(\)\.clone\(\)"),
        (torch.Tensor, r"torch\.Tensor\(x\).*use x itself"),
    ],
)
def test_what_makes_plain_tensors_of_the_memory_says_what_to_do(
    comm: Any, make: Callable[[torch.Tensor], Any], match: str
) -> None:
    raises_everywhere(comm, dc.UnsupportedOperation, match, lambda: make(_images(comm).float()))


@pytest.mark.ranks(2)
def test_a_capsule_of_a_plain_tensor_is_torchs(comm: Any) -> None:
    assert torch.equal(torch.from_dlpack(_capsule(torch.ones(3))), torch.ones(3))
