"""Digests tell values apart, whatever the order of memory is, and name the tensors and the ranks that differ."""

from __future__ import annotations

import pytest
import torch

from distconv.communication.digest import difference, different, digest
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
    assert list(different(comm, tensors, "test")) == ["other"]
    text = difference(comm, tensors, comm.rank)
    others = ", ".join(str(rank) for rank in range(comm.size) if rank != 1)
    assert text.startswith("1 of 3 parameters and buffers are no longer the same on all ranks, the first is 'other': ")
    assert f"one on rank {others}, another one on rank 1" in text
    assert not difference(comm, {"same": tensors["same"]}, comm.rank)
