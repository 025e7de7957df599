"""Digests tell values apart, whatever the order of memory is, and name the tensors and the ranks that differ."""

from __future__ import annotations

import pytest
import torch

from distconv.communication.digest import checksum, describe_difference, digest, find_differing
from tests.distconv.layouts import normal


def test_a_digest_is_of_the_values_not_of_their_order_in_memory():
    x = normal(3, 4, 5)
    assert digest(x) == digest(x.permute(2, 0, 1).contiguous().permute(1, 2, 0)) == digest(x.clone().requires_grad_())
    assert digest(x) != digest(x.permute(2, 0, 1))
    z = torch.complex(x, x.sin())
    assert z.conj().is_conj() and z.conj().imag.is_neg()
    assert digest(z.conj()) == digest(torch.complex(x, -x.sin())) != digest(z)
    assert digest(z.conj().imag) == digest(-x.sin())
    other = x.clone()
    other[2, 3, 4] = other[2, 3, 4].nextafter(torch.tensor(9.0))
    assert digest(other) != digest(x)


@pytest.mark.ranks(2, 3, 4)
def test_what_differs_is_named_with_its_ranks_on_all(comm):
    tensors = {"same": normal(3, 4), "nan": torch.tensor([torch.nan]), "other": normal(3, 4, seed=int(comm.rank == 1))}
    assert list(find_differing(comm, tensors, "test")) == ["other"]
    text = describe_difference(comm, tensors, comm.rank)
    others = ", ".join(str(rank) for rank in range(comm.size) if rank != 1)
    assert text.startswith("1 of 3 parameters and buffers are no longer the same on all ranks, the first is 'other': ")
    assert f"one on rank {others}, another one on rank 1" in text
    assert not describe_difference(comm, {"same": tensors["same"]}, comm.rank)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("count", [1, 4, 7, 4096])
def test_constants_have_other_checksums_in_any_number(dtype, count):
    tensors = [torch.full((count,), value).to(dtype) for value in (0, 1, 2, 3, 4, 8)]
    assert len({checksum(tensor) for tensor in tensors}) == len(tensors)


def test_a_checksum_is_that_of_the_values_in_their_order():
    x = normal(9, 7)
    assert checksum(x) == checksum(x.t().contiguous().t()) != checksum(x.t())
    for index in ((0, 0), (8, 6)):
        other = x.clone()
        other[index] = other[index].nextafter(torch.tensor(9.0))
        assert checksum(other) != checksum(x)
