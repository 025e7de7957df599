"""Which ranks run which stage."""

from __future__ import annotations

import pytest

from distconv.errors import GridError
from distconv.pipeline.runtime.placement import Place, Placement


def test_ranks_go_stage_by_stage_and_replica_by_replica():
    placement = Placement(7, (2, 1), [{"h": 2}, {"n": 3}])
    assert placement.places == [
        *(Place(0, replica, member) for replica in range(2) for member in range(2)),
        *(Place(1, 0, member) for member in range(3)),
    ]


def test_micro_batches_go_to_replicas_in_turn():
    placement = Placement(7, (2, 1), [{"h": 2}, {"n": 3}])
    assert [placement.ranks(0, m) for m in range(3)] == [range(2), range(2, 4), range(2)]
    assert [placement.ranks(1, m) for m in range(2)] == [range(4, 7)] * 2


def test_a_stage_without_a_grid_has_one_rank():
    assert Placement(3, (1, 1, 1), [None, {}, {"h": 1}]).places == [Place(stage, 0, 0) for stage in range(3)]


@pytest.mark.parametrize(
    ("ranks", "replicas", "grids", "words"),
    [
        (3, (1, 1), None, r"2 stages need 1 \+ 1 = 2 ranks, but the communicator has 3"),
        (4, (2, 1), [{"h": 2}, None], r"2 x \(h=2\) \+ 1 = 5 ranks, but the communicator has 4"),
        (2, (1, 1), [None], "1 grids for 2 stages"),
        (2, (1, 1), [None, {"q": 1}], "unknown axis 'q'"),
        (2, (1, 1), [None, {"h": 0}], "h=0"),
    ],
)
def test_what_does_not_fit_is_refused(ranks, replicas, grids, words):
    with pytest.raises(GridError, match=words):
        Placement(ranks, replicas, grids)
