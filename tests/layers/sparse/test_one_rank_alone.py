"""A single rank passes a different value to sparse tensors: the same error on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distconv.layers import sparse
from distconv.layers.sparse.tensor import SparseTensor
from tests.distconv.layouts import grid_over
from tests.distconv.one_rank_alone import Case, Rank, check

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(20)]


def cloud(
    r: Rank,
    at: int = 2,
    dtype: Any = None,
    channels: int = 1,
    samples: int = 1,
    stride: int = 1,
    borders: int | None = None,
    partition: Any = None,
) -> SparseTensor:
    coords = torch.tensor([[0, 0], [0, at], [0, 8]])
    x = SparseTensor(coords, torch.zeros(3, channels, dtype=dtype), stride, batch_size=samples)
    x = x.with_spatial_shape(borders)
    return sparse.scatter(x, grid_over(r.comm, w=r.size), partition)


def of_other(r: Rank, shift: int = 0) -> Any:
    return sparse.Partition(grid_over(r.comm, w=r.size), ((), tuple(range(1 + shift, r.size + shift))))


def own_sites(r: Rank, features: torch.Tensor, samples: int = 1, site: int | None = None, shift: int = 0) -> object:
    at = r.comm.rank if site is None or not r.odd else site
    return sparse.from_local(torch.tensor([[0, at]]), features, of_other(r, shift), samples)


SPARSE: dict[str, Case] = {
    "sparse scatter: coordinates": (lambda r: cloud(r, at=r.pick(2, 4)), "sparse scatter: ranks disagree"),
    "sparse scatter: dtype": (lambda r: cloud(r, dtype=r.pick(torch.float32, torch.float64)), "sparse scatter"),
    "sparse scatter: channels": (lambda r: cloud(r, channels=r.pick(1, 2)), "sparse scatter: ranks disagree"),
    "sparse scatter: batch": (lambda r: cloud(r, samples=r.pick(1, 2)), "sparse scatter: ranks disagree"),
    "sparse scatter: stride": (lambda r: cloud(r, stride=r.pick(1, 2)), "sparse scatter: ranks disagree"),
    "sparse scatter: borders": (lambda r: cloud(r, borders=r.pick(None, 9)), "sparse scatter: ranks disagree"),
    "sparse scatter: boxes": (
        lambda r: cloud(r, partition=r.pick(None, of_other(r))),
        "sparse scatter: ranks disagree",
    ),
    "sparse from_local: channels": (lambda r: own_sites(r, torch.zeros(1, r.pick(1, 2))), "sparse from_local: ranks"),
    "sparse from_local: dtype": (
        lambda r: own_sites(r, torch.zeros(1, 1, dtype=r.pick(None, torch.half))),
        "from_local: r",
    ),
    "sparse from_local: batch": (lambda r: own_sites(r, torch.zeros(1, 1), r.pick(1, 2)), "sparse from_local: ranks"),
    "sparse from_local: cuts": (
        lambda r: own_sites(r, torch.zeros(1, 1), shift=-int(r.odd)),
        "sparse from_local: ranks disagree",
    ),
    "sparse from_local: rows": (lambda r: own_sites(r, torch.zeros(r.pick(1, 2), 1)), r"\(on rank"),
    "sparse from_local: foreign site": (lambda r: own_sites(r, torch.zeros(1, 1), site=0), "are not in its box"),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors(rank: Rank, name: str) -> None:
    check(rank, *SPARSE[name])
