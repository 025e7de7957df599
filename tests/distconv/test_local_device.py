"""The GPU of a rank: by its number on the node, set once."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from distconv import local_device
from distconv.local_device import choose_local_rank


@pytest.fixture
def gpus(monkeypatch):
    """Makes as many GPUs as are asked for; the list of those that were made current."""
    current: list[torch.device] = []
    dc.device.cache_clear()
    monkeypatch.setattr(local_device, "_local_rank", None)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)

    def made(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        return current

    yield made
    dc.device.cache_clear()


@pytest.fixture
def no_launcher(monkeypatch):
    for name in local_device._VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_a_gpu_it_is_the_cpu(gpus):
    assert gpus(0) == []
    assert dc.device() == torch.device("cpu")


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ranks_take_the_gpus_of_their_node_in_turn_and_set_them_once(comm, gpus, no_launcher, count):
    current = gpus(count)
    local_device.set_local_rank(comm)
    expected = torch.device("cuda", comm.rank % count)
    assert [dc.device(), dc.device()] == [expected] * 2
    assert current == [expected]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("variable", ["SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"])
def test_the_launchers_number_is_taken_if_each_rank_has_one(comm, gpus, no_launcher, monkeypatch, variable):
    gpus(2)
    monkeypatch.setenv(variable, str(1 - comm.rank))
    local_device.set_local_rank(comm)
    assert dc.device().index == 1 - comm.rank


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # (OMPI, MPI_LOCALRANKID, MV2, PALS, SLURM_LOCALID) of each rank of the node
        ([("", "", "", "", ""), ("", "", "", "", "")], [0, 1]),
        ([("", "", "", "", "0"), ("", "", "", "", "0")], [0, 1]),  # mpiexec in a batch script
        ([("", "1", "", "", "0"), ("", "0", "", "", "0")], [1, 0]),
        ([("", "", "", "", "3"), ("", "", "", "", "")], [0, 1]),
        ([("", "", "", "", "3")], [3]),  # a container for each rank
        ([("", "", "", "", "x"), ("", "", "", "", "y")], [0, 1]),
    ],
)
def test_a_number_that_ranks_share_or_lack_is_none(given, expected):
    assert [choose_local_rank(given, place) for place in range(len(given))] == expected


@pytest.mark.ranks(2)
def test_before_the_first_grid_ranks_without_numbers_have_no_gpu_of_their_own(comm, gpus, no_launcher):
    gpus(2)
    with pytest.raises(dc.LaunchError, match="Make the ProcessGrid first"):
        dc.device()
    local_device.set_local_rank(comm)
    assert dc.device().index == comm.rank
