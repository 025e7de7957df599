"""By what tensors of GPUs go, which all ranks decide alike."""

from __future__ import annotations

import contextlib

import pytest
import torch

import distconv as dc
from distconv.communication.derived import CommunicatorRegistry
from distconv.communication.gpu import device_transport, nccl
from distconv.communication.gpu.cuda_aware import MpiSupport
from distconv.communication.transport import Exchange
from distconv.errors import CommunicatorError
from tests.distconv.communication.late_transports import by
from tests.distconv.layouts import grid_over, raises_everywhere
from tests.harness.late_gpu import DEVICE


@pytest.mark.cpu
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("nccl_s", [1.0, 3.0])
def test_left_to_choose_all_ranks_take_what_is_faster_on_the_slowest(comm, monkeypatch, aware, nccl_s):
    with by("nccl", "late", comm) as (_, own), monkeypatch.context() as patch:
        patch.delenv("DISTCONV_TRANSPORT")
        patch.setattr(device_transport, "probe_mpi_support", lambda comm, device: MpiSupport(aware, aware))
        slow = nccl_s if comm.rank == 0 else 1.0
        clock = iter([0.0, slow, 0.0, 2.0])
        patch.setattr(device_transport.time, "perf_counter", lambda: next(clock))
        chosen = device_transport._choose(own, DEVICE)
        assert (chosen.channel is not None) == (nccl_s < 2)
        assert chosen.mpi_support == MpiSupport(aware, aware)


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_ranks_have_no_channel_on_one_gpu_or_without_nccl(comm, monkeypatch):
    with by("host", "late", comm) as (_, own), monkeypatch.context() as patch:
        patch.delenv("NCCL_MULTI_RANK_GPU_ENABLE")
        assert device_transport.describe_missing(own, DEVICE) == "2 ranks share 1 GPUs, and NCCL needs one for each"
        patch.setattr(nccl, "is_available", lambda: comm.rank == 0)
        assert (
            device_transport.describe_missing(own, DEVICE)
            == "torch on rank 1 has no NCCL (2.6 or newer, built for CUDA)"
        )


def test_without_a_gpu_nothing_is_decided(comm):
    assert device_transport.choose_transport(comm, torch.zeros(3, device="cpu")) == device_transport.HOST
    device_transport.choose_mpi(comm, torch.device("cpu"))
    assert CommunicatorRegistry.get(comm).get_attached(device_transport.Transports) == {}


@pytest.mark.cpu
@pytest.mark.fault(100)
@pytest.mark.ranks(2)
def test_a_tensor_on_another_gpu_than_the_ranks_first_is_refused_by_name(comm):
    with by("nccl", "late", comm) as (gpu, own):
        x = gpu.tensor(torch.ones(3))
        channel = CommunicatorRegistry.get(own).get_attached(device_transport.Transports)["cuda"].channel
        channel.device = torch.device("cuda", 1)
        for call in (
            lambda: Exchange(own, [(1 - own.rank, x)], [(1 - own.rank, x)], "a message"),
            lambda: device_transport.choose_transport(own, x),
        ):
            with pytest.raises(CommunicatorError, match=r"on cuda:0, but rank . sends by NCCL from cuda:1.*dc.device"):
                call()
        channel.device = DEVICE


@pytest.fixture
def refused(comm, monkeypatch):
    """NCCL cannot be initialized on the last rank."""

    def group(store, name, comm, device):
        if comm.rank == comm.size - 1:
            raise RuntimeError("NCCL error: unhandled system error\nException raised from create")
        store.wait(["never"])

    with by("host", "late", comm) as (_, own), monkeypatch.context() as patch:
        patch.setattr(nccl, "_group", group)
        yield own, patch


@pytest.mark.cpu
@pytest.mark.fault(96)
@pytest.mark.ranks(2, 3)
def test_without_a_communicator_of_nccl_on_one_rank_all_go_through_mpi(comm, refused):
    own, patch = refused
    patch.delenv("DISTCONV_TRANSPORT")
    with contextlib.ExitStack() as stack:
        if comm.rank == 0:
            stack.enter_context(pytest.warns(UserWarning, match=f"unhandled system error .on rank {comm.size - 1}."))
        assert device_transport._choose(own, DEVICE) == device_transport.HOST


@pytest.mark.long
@pytest.mark.cpu
@pytest.mark.fault(96)
@pytest.mark.ranks(2, 3)
def test_where_nccl_is_forced_all_ranks_hear_that_one_has_none(comm, refused):
    own, patch = refused
    patch.setenv("DISTCONV_TRANSPORT", "nccl")
    raises_everywhere(
        comm,
        CommunicatorError,
        r"=nccl: NCCL error: unhandled system error .* set DISTCONV_TRANSPORT=host",
        lambda: device_transport._choose(own, DEVICE),
    )


@pytest.mark.gpu
@pytest.mark.ranks(at_least=2)
def test_ranks_that_share_a_gpu_are_told_so_where_nccl_is_forced(comm, monkeypatch):
    monkeypatch.setenv("DISTCONV_TRANSPORT", "nccl")
    if not device_transport.describe_missing(comm, torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("each rank has a GPU of its own")
    own = comm.Dup()
    with pytest.raises(CommunicatorError, match=r"DISTCONV_TRANSPORT=nccl: .*; set DISTCONV_TRANSPORT=host"):
        dc.scatter(torch.zeros(2, 2, device="cuda"), grid_over(own, n=comm.size))
    own.Free()
