"""One rank alone passes something else to backpropagate: the same error on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distconv.kernels.scan.backpropagation import backpropagate
from tests.distconv.one_rank_alone import Case, Rank, check

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(20)]


def scan(method: str = "linear", depth: Any = None, **other: Any) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        kind, width = (r.pick(usual, other.get(name, usual)) for name, usual in (("dtype", None), ("width", 3)))
        return backpropagate(
            torch.ones(2, 3) if r.comm.rank == 0 else None,
            other["jacobians"] if r.odd and "jacobians" in other else torch.ones(2, 2, width, width, dtype=kind),
            r.pick("linear", method),
            r.comm,
            depth=r.pick(None, depth),
        )

    return call


SCANS: dict[str, Case] = {
    "scan: method": (scan("blelloch"), "method of backpropagate: ranks disagree"),
    "scan: unknown method": (scan("other"), "backpropagate"),
    "scan: depth": (scan(depth=1), "method of backpropagate: ranks disagree"),
    "scan: dtype": (scan(dtype=torch.float64), "values on rank"),
    "scan: width": (scan(width=4), "has 4 columns"),
    "scan: no Jacobians": (scan(jacobians=None), r"NoneType.*\(on rank"),
}


@pytest.mark.parametrize("name", SCANS)
def test_scans(rank: Rank, name: str) -> None:
    check(rank, *SCANS[name])
