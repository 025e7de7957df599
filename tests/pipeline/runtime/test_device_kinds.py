"""Kinds of devices: how they are written, and ranks that take the stages that are for their kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mpi4py import MPI

from distconv.errors import PlanError
from distconv.pipeline.runtime.device_kinds import as_name, kind_of_rank, parse_kinds, reorder_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("text", ["old", "old:0", "old:2,old:1", "Old:2", "", "old:2,", "old:-1", "gpu:x", "a b:1"])
def test_what_names_no_kinds_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(PlanError, match="such as old:2,new:2, or gpu or host"):
        parse_kinds(text)


@pytest.mark.ranks(3)
def test_counted_kinds_go_by_the_order_of_ranks(comm: Any) -> None:
    kinds = parse_kinds("old:1,new:2")
    assert comm.allgather(kind_of_rank(kinds, comm, CPU)) == ["old", "new", "new"]


@pytest.mark.ranks(2)
def test_a_host_names_the_kind_of_its_ranks(comm: Any) -> None:
    assert kind_of_rank(parse_kinds("host"), comm, CPU) == as_name(MPI.Get_processor_name())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("text", "words"),
    [("old:1,new:2", "3 ranks are counted, but there are 2"), ("gpu", "devices gpu: cpu has no such name")],
)
def test_ranks_that_are_not_there_and_gpus_that_are_none_are_refused(comm: Any, text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        kind_of_rank(parse_kinds(text), comm, CPU)


def order_of(comm: Any, kind: str | None, wanted: list[str]) -> Iterator[int]:
    """The rank of ``comm`` at each place."""
    with reorder_ranks(comm, kind, wanted) as ranks:
        yield from ranks.allgather(comm.rank)


@pytest.mark.ranks(4)
def test_ranks_are_where_their_kinds_are_wanted_and_in_their_order_otherwise(comm: Any) -> None:
    kind = ["new", "old", "new", "old"][comm.rank]
    assert list(order_of(comm, kind, ["old", "old", "new", "new"])) == [1, 3, 0, 2]
    assert list(order_of(comm, kind, ["new", "old", "old", "new"])) == [0, 1, 3, 2]
    assert list(order_of(comm, None, [])) == [0, 1, 2, 3]


@pytest.mark.ranks(2, 3)
def test_other_devices_than_those_wanted_are_refused_on_all_ranks(comm: Any) -> None:
    wanted = ["old"] * (comm.size - 1) + ["new"]
    with pytest.raises(PlanError, match=rf"made for old:{comm.size - 1},new:1, found old:{comm.size}"):
        list(order_of(comm, "old", wanted))
    with pytest.raises(PlanError, match="specify the kind of device of each rank"):
        list(order_of(comm, None if comm.rank else "old", wanted))
