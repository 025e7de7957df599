"""One rank alone passes something else to save_checkpoint or load_checkpoint: the same error on all ranks."""

from __future__ import annotations

import pytest

import distconv as dc
from tests.distconv.one_rank_alone import Case, Rank, check, with_weight

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(20)]

CHECKPOINTS: dict[str, Case] = {
    "checkpoint saved: folder": (
        lambda r: dc.save_checkpoint(r.pick("a", "b"), 1, with_weight(len), comm=r.comm),
        "sav",
    ),
    "checkpoint saved: step": (
        lambda r: dc.save_checkpoint("a", r.pick(1, 2), with_weight(len), comm=r.comm),
        "step 2 in",
    ),
    "checkpoint saved: a value of no kind": (
        lambda r: dc.save_checkpoint("a", 1, with_weight(len), comm=r.comm, values=r.pick({}, 3)),
        "values is a int",
    ),
    "checkpoint loaded: folder": (
        lambda r: dc.load_checkpoint(r.pick("a", "b"), with_weight(len), comm=r.comm),
        "load",
    ),
    **{
        f"checkpoint loaded: {option}": (
            lambda r, o=option: dc.load_checkpoint(
                "a", with_weight(len), comm=r.comm, **r.pick({}, {o: o != "strict"})
            ),
            "load_checkpoint: ranks disagree",
        )
        for option in ("strict", "convert_dtype", "fallback", "missing_ok")
    },
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(rank: Rank, name: str) -> None:
    check(rank, *CHECKPOINTS[name])
