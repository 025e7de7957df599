"""Functions that opt_einsum looks up in the package of a DistTensor's class."""

from __future__ import annotations

import importlib

import torch

import distconv as dc
from tests.distconv.layouts import grid_over, normal


def test_contractions_are_found_where_opt_einsum_looks_for_them(comm):
    x, w = normal(3, 4, 5), normal(5, 4, 2, seed=1)
    d = dc.scatter(x, grid_over(comm, w=comm.size), dims=(None, None, "w"))
    found = importlib.import_module(type(d).__module__.split(".")[0])
    y = found.tensordot(d, w, axes=((1, 2), (1, 0)))
    torch.testing.assert_close(dc.gather(y), torch.tensordot(x, w, ((1, 2), (1, 0))))
    torch.testing.assert_close(dc.gather(found.einsum("abc,cbd->ad", d, w)), torch.tensordot(x, w, ((1, 2), (1, 0))))
    assert torch.equal(dc.gather(found.transpose(d, (2, 0, 1))), x.permute(2, 0, 1))
