"""Which memory MPI is handed for tensors of a GPU; that it is written by then is in ``test_transport.py``."""

from __future__ import annotations

import ctypes
import types

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.communication import staging
from distconv.communication.transport import Exchange, allreduce
from tests.distconv.layouts import normal
from tests.harness.late_libraries import late_gpu


def neighbours(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


@pytest.mark.fault(54)
def test_without_a_gpu_nothing_is_staged():
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    assert staging.Staging.of([torch.zeros(3)]) is None
    assert not staging.cuda_aware()


@pytest.mark.fault(54)
def test_an_mpi_that_was_forced_to_take_device_memory_has_to_deliver_it(monkeypatch):
    monkeypatch.setenv("DISTCONV_TRANSPORT", "cuda-aware")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for arrives in (False, True):
        monkeypatch.setattr(staging, "_arrives", lambda arrives=arrives: arrives)
        if arrives:
            assert staging.cuda_aware.__wrapped__()
        else:
            with pytest.raises(dc.CommunicatorError, match="DISTCONV_TRANSPORT says so; set DISTCONV_TRANSPORT=host"):
                staging.cuda_aware.__wrapped__()


@pytest.mark.fault(54)
@pytest.mark.cpu
@pytest.mark.parametrize("carries", [False, True])
def test_device_memory_is_handed_to_mpi_only_if_a_message_arrives(comm, monkeypatch, carries):
    with late_gpu("late") as gpu:
        monkeypatch.setattr(staging, "_claimed", lambda: True)
        monkeypatch.delenv("DISTCONV_TRANSPORT", raising=False)
        if carries:
            assert staging.Staging(gpu.tensor(torch.ones(3)).device).direct
            return
        elsewhere = types.SimpleNamespace(fromaddress=lambda address, nbytes: bytearray(nbytes))
        monkeypatch.setattr(
            staging, "MPI", types.SimpleNamespace(buffer=elsewhere, COMM_SELF=MPI.COMM_SELF, BYTE=MPI.BYTE)
        )
        with pytest.raises(dc.CommunicatorError, match="though it says so; set DISTCONV_TRANSPORT=host"):
            staging.Staging(gpu.tensor(torch.ones(3)).device)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("variable", "value", "claimed"),
    [("MPICH_GPU_SUPPORT_ENABLED", "1", True), ("OMPI_MCA_opal_cuda_support", "true", True), ("HOME", "/", False)],
)
def test_an_mpi_says_that_it_takes_device_memory(monkeypatch, variable, value, claimed):
    for name in ("MPICH_GPU_SUPPORT_ENABLED", "OMPI_MCA_opal_cuda_support"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace())
    assert staging._claimed() == claimed
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(MPIX_Query_cuda_support=lambda: 1))
    assert staging._claimed()


@pytest.mark.fault(54)
@pytest.mark.gpu
@pytest.mark.ranks(at_least=2)
def test_messages_and_sums_of_a_gpu_are_those_of_the_cpu(comm):
    after, before = neighbours(comm)
    received = torch.zeros(300, 300, device="cuda", dtype=torch.float64)
    exchange = Exchange(comm, [(after, normal(300, 300, seed=comm.rank).cuda())], [(before, received)], "a ring")
    exchange.wait()
    assert torch.equal(received.cpu(), normal(300, 300, seed=before))
    total = allreduce(comm, normal(50, seed=comm.rank).cuda(), "a sum").cpu()
    torch.testing.assert_close(total, sum(normal(50, seed=rank) for rank in range(comm.size)), rtol=1e-13, atol=1e-13)
