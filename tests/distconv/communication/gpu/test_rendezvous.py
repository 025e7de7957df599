"""Process groups are there on all ranks or on none, and no rank waits for one that has failed."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from distconv.communication.gpu import nccl, rendezvous
from distconv.errors import CommunicatorError
from tests.distconv.layouts import raises_everywhere

CPU = torch.device("cpu")


@pytest.mark.long
@pytest.mark.cpu
@pytest.mark.fault(96)
@pytest.mark.ranks(2, 3)
def test_ranks_inside_a_real_rendezvous_come_out_when_one_fails(comm, monkeypatch):
    def group(store, name, comm, device, made_by=nccl._group):
        if (name, comm.rank) == ("sums", comm.size - 1):
            raise TypeError("unhandled system error\nException raised from create")
        return made_by(store, name, comm, device)

    monkeypatch.setattr(nccl, "_group", group)
    start = time.monotonic()
    raises_everywhere(
        comm,
        CommunicatorError,
        rf"^unhandled system error \(on rank {comm.size - 1}\)$",
        lambda: nccl.Channel(comm, CPU),
    )
    assert time.monotonic() - start < 20
    # torch takes seconds to write where in C++ an error was, on a machine that has other work.
    inside = [thread for thread in threading.enumerate() if thread.name == "distconv-rendezvous"]
    for thread in inside:
        thread.join(20)
    assert not any(thread.is_alive() for thread in inside)


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_a_rank_that_never_comes_is_given_up_on_all(comm, monkeypatch):
    monkeypatch.setattr(rendezvous, "CONNECT_S", 0.3)
    done = []

    def attempt():
        while not done and comm.rank == 1:
            time.sleep(0.01)
        return comm.rank

    undone = []
    raises_everywhere(
        comm,
        CommunicatorError,
        r"^the ranks were not connected within 0.3 s \(on rank 1\)$",
        lambda: rendezvous.attempt_with_timeout(comm, attempt, undone.append, give_up=lambda: done.append(True)),
    )
    end = time.monotonic() + 10
    while not undone and time.monotonic() < end:
        time.sleep(0.01)
    assert undone == [comm.rank]


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_the_store_that_cannot_be_served_is_an_error_on_all_ranks(comm, monkeypatch):
    def store(host, port, serves):
        raise RuntimeError("The server socket has failed to listen")

    monkeypatch.setattr(rendezvous, "_store", store)
    raises_everywhere(comm, CommunicatorError, "failed to listen .on rank 0.", lambda: nccl.Channel(comm, CPU))
