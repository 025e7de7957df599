"""When messages go by NCCL, and what is heard of those under way; what they bring is in ``test_transport.py``."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI

import distconv as dc
from distconv.communication import nccl, staging
from distconv.communication.derived import Derived
from distconv.communication.transport import Exchange, Reduction, allreduce
from distconv.errors import CommunicatorError
from tests.distconv.communication.late_transports import by
from tests.distconv.layouts import grid_over, normal
from tests.layers.compare import same_as_one_process


@pytest.fixture
def by_nccl(comm, monkeypatch):
    monkeypatch.setenv("DISTCONV_TRANSPORT", "nccl")
    if nccl.missing(comm, torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("NCCL needs a GPU for each rank")
    for state in (derived := Derived.of(comm)), Derived.of(MPI.COMM_WORLD):
        monkeypatch.setattr(state, "offered", False)
        monkeypatch.setattr(state, "channel", None)
    return nccl.offer(comm, torch.zeros(1, device="cuda")), derived


def neighbours(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def network(x, weight, scale):
    y = F.conv2d(x, weight, padding=1)
    y = F.batch_norm(y, None, None, scale, None, True)
    return F.max_pool2d(y.relu(), 3, 2, 1)


@pytest.mark.cpu
@pytest.mark.ranks(2, 3)
def test_the_watchdog_hears_of_the_oldest_work_that_the_gpu_has_not_done(comm):
    with by("nccl", "late", comm) as (gpu, own):
        assert not list(nccl._waited_for())
        first = Reduction(own, gpu.tensor(torch.ones(3)), "the first sum")
        second = Reduction(own, gpu.tensor(torch.ones(3)), "the second sum")
        ((_, what),) = nccl._waited_for()
        assert what() == "the first sum (by NCCL)"
        first.wait().cpu()
        ((_, what),) = nccl._waited_for()
        assert what() == "the second sum (by NCCL)"
        second.wait().cpu()
        assert not list(nccl._waited_for())


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_a_peer_that_was_lost_is_an_error_where_it_is_waited_for(comm):
    with by("nccl", "late", comm) as (gpu, own):
        reduction = Reduction(own, gpu.tensor(torch.ones(3)), "a sum")
        Derived.of(own).channel._comm.lost = True
        with pytest.raises(CommunicatorError, match="NCCL: unhandled system error"):
            reduction.wait()


@pytest.mark.cpu
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("nccl_s", [1.0, 3.0])
def test_left_to_choose_all_ranks_take_what_is_faster_on_the_slowest(comm, monkeypatch, aware, nccl_s):
    with by("nccl", "late", comm) as (gpu, own):
        monkeypatch.delenv("DISTCONV_TRANSPORT")
        monkeypatch.setattr(staging, "cuda_aware", lambda: aware)
        slow = nccl_s if comm.rank == 0 else 1.0
        clock = iter([0.0, slow, 0.0, 2.0])
        monkeypatch.setattr(nccl.time, "perf_counter", lambda: next(clock))
        assert (nccl._chosen(own, gpu.tensor(torch.ones(3)).device) is not None) == (nccl_s < 2)


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_ranks_have_no_channel_on_one_gpu_or_without_cupy(comm, monkeypatch):
    with by("host", "late", comm) as (_, own):
        monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE")
        assert nccl.missing(own, torch.device("cuda", 0)) == "2 ranks share 1 GPUs, and NCCL needs one for each"
        monkeypatch.setattr(nccl, "_library", lambda: None if comm.rank else object())
        assert nccl.missing(own, torch.device("cuda", 0)).startswith(
            "there is no CuPy with NCCL on rank 1 (pip install"
        )


def test_without_a_gpu_no_channel_is_offered(comm):
    assert nccl.offer(comm, torch.zeros(3, device="cpu")) is None
    assert not Derived.of(comm).offered


@pytest.mark.gpu
@pytest.mark.ranks(at_least=2)
def test_messages_and_sums_by_nccl_are_those_of_the_cpu(comm, by_nccl):
    channel, _ = by_nccl
    after, before = neighbours(comm)
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.complex64):
        sent = normal(300, 300, seed=comm.rank).to(dtype).cuda()
        received, nothing = torch.zeros_like(sent), sent[:0]
        exchange = Exchange(comm, [(after, sent), (after, nothing)], [(before, received), (before, nothing)], "a ring")
        assert exchange._channel is channel
        exchange.wait()
        assert torch.equal(received, normal(300, 300, seed=before).to(dtype).cuda())
    for op, expected in ((MPI.SUM, sum(range(comm.size))), (MPI.MAX, comm.size - 1), (MPI.MIN, 0)):
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            found = allreduce(comm, torch.full((5,), comm.rank, dtype=dtype, device="cuda"), "a sum", op)
            assert found.tolist() == [expected] * 5
    total = allreduce(comm, torch.full((2,), 1 + 2j, device="cuda"), "a sum")
    assert total.tolist() == [comm.size * (1 + 2j)] * 2


@pytest.mark.gpu
@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("axes", ["h", "w", "c", "n"])
def test_layers_by_nccl_equal_one_process(comm, by_nccl, axes):
    grid = grid_over(comm, **{axes: comm.size})
    tensors = [normal(4, 4, 9, 8), normal(4, 4, 3, 3, seed=1), normal(4, seed=2)]
    x, *plain = [tensor.cuda() for tensor in tensors]
    same_as_one_process(grid, network, x, plain=plain)
    assert Derived.of(grid.world).channel is not None


@pytest.mark.gpu
@pytest.mark.ranks(at_least=2)
def test_ranks_that_share_a_gpu_are_told_so_where_nccl_is_forced(comm, monkeypatch):
    monkeypatch.setenv("DISTCONV_TRANSPORT", "nccl")
    if not nccl.missing(comm, torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("each rank has a GPU of its own")
    own = comm.Dup()
    with pytest.raises(CommunicatorError, match=r"DISTCONV_TRANSPORT=nccl: .*; set DISTCONV_TRANSPORT=host"):
        dc.scatter(torch.zeros(2, 2, device="cuda"), grid_over(own, n=comm.size))
    own.Free()


class RefusingLibrary:
    """CuPy's binding, where one rank gets no communicator."""

    def __init__(self, refuser):
        self.refuser = refuser

    def get_unique_id(self):
        return "number"

    def NcclCommunicator(self, size, identifier, rank):
        assert identifier == "number"
        if rank == self.refuser:
            raise RuntimeError("unhandled system error")
        return object()


@pytest.fixture
def refused(comm, monkeypatch):
    monkeypatch.setattr(nccl, "_library", lambda: RefusingLibrary(comm.size - 1))
    monkeypatch.setattr(nccl, "missing", lambda comm, device: "")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


@pytest.mark.ranks(2, 3)
def test_without_a_communicator_of_nccl_on_one_rank_all_go_through_mpi(comm, refused, monkeypatch):
    monkeypatch.delenv("DISTCONV_TRANSPORT", raising=False)
    with contextlib.ExitStack() as stack:
        if comm.rank == 0:
            stack.enter_context(pytest.warns(UserWarning, match=f"unhandled system error .on rank {comm.size - 1}."))
        assert nccl._chosen(comm, torch.device("cuda", 0)) is None


@pytest.mark.ranks(2, 3)
def test_where_nccl_is_forced_all_ranks_hear_that_one_has_none(comm, refused, monkeypatch):
    monkeypatch.setenv("DISTCONV_TRANSPORT", "nccl")
    with pytest.raises(CommunicatorError, match=r"=nccl: unhandled system error .* set DISTCONV_TRANSPORT=host"):
        nccl._chosen(comm, torch.device("cuda", 0))
