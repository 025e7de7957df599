"""Messages and sums by torch's process groups: for real by gloo, and by a late NCCL; more in ``test_transport.py``."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI

import distconv as dc
from distconv.capture.captured import capture
from distconv.communication.derived import CommunicatorRegistry
from distconv.communication.gpu import device_transport, nccl
from distconv.communication.transport import Exchange, Reduction, allreduce, count_traffic
from distconv.errors import CommunicatorError
from tests.distconv.communication.by_gloo import by_gloo
from tests.distconv.communication.late_transports import by
from tests.distconv.layouts import grid_over, normal
from tests.harness import late_gpu


def neighbours(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def network(x, weight, scale):
    y = F.conv2d(x, weight, padding=1)
    y = F.batch_norm(y, None, None, scale, None, True)
    return F.max_pool2d(y.relu(), 3, 2, 1)


def ring_and_sums(comm, channel, device):
    """Check messages between neighbours, an empty one with them, and sums of all kinds."""
    after, before = neighbours(comm)
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.complex64, torch.bool):
        sent = normal(300, 300, seed=comm.rank).to(dtype).to(device)
        received, nothing = torch.zeros_like(sent), sent[:0]
        exchange = Exchange(comm, [(after, sent), (after, nothing)], [(before, received), (before, nothing)], "a ring")
        assert exchange._channel is channel
        exchange.wait()
        assert torch.equal(received, normal(300, 300, seed=before).to(dtype).to(device))
    for op, expected in ((MPI.SUM, sum(range(comm.size))), (MPI.MAX, comm.size - 1), (MPI.MIN, 0), (MPI.PROD, 0)):
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            found = allreduce(comm, torch.full((5,), comm.rank, dtype=dtype, device=device), "a sum", op)
            assert found.tolist() == [expected] * 5
    total = allreduce(comm, torch.full((2,), 1 + 2j, device=device), "a sum")
    assert total.tolist() == [comm.size * (1 + 2j)] * 2
    product = allreduce(comm, torch.tensor([1 + 2j, 1j + comm.rank], device=device), "a product", MPI.PROD)
    assert product.tolist() == [(1 + 2j) ** comm.size, math.prod(1j + rank for rank in range(comm.size))]


# -- for real, by gloo -------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.cpu
@pytest.mark.ranks(2, 3)
def test_messages_and_sums_by_a_process_group_are_those_of_mpi(comm):
    with by_gloo(comm) as (channel, own):
        ring_and_sums(own, channel, "cpu")


def trained(comm):
    """Gradients of a network over ``h``, and the bytes of its messages and sums."""
    grid = grid_over(comm, h=comm.size)
    x = dc.scatter(normal(4, 4, 9, 8), grid).requires_grad_()
    weight, scale = (normal(*shape, seed=1).requires_grad_() for shape in ((4, 4, 3, 3), (4,)))
    with count_traffic() as traffic:
        network(x, weight, scale).square().sum().backward()
    return [x.grad.local, weight.grad, scale.grad], traffic


class CountingGroup:
    """A process group that notes the bytes of the messages and sums that it is handed."""

    def __init__(self, group):
        self._group, self.sent, self.reduced = group, 0, 0

    def __getattr__(self, name):
        return getattr(self._group, name)

    def send(self, tensors, peer, tag):
        self.sent += sum(tensor.nbytes for tensor in tensors)
        return self._group.send(tensors, peer, tag)

    def allreduce(self, tensors, options):
        self.reduced += sum(tensor.nbytes for tensor in tensors)
        return self._group.allreduce(tensors, options)


@pytest.mark.cpu
@pytest.mark.ranks(2, 3, 4)
def test_process_groups_are_handed_the_bytes_that_mpi_is_and_give_every_rank_the_same_bits(comm, monkeypatch):
    groups, group = [], nccl._group

    def noted(*words):
        groups.append(CountingGroup(group(*words)))
        return groups[-1]

    by_mpi, expected = trained(comm)
    monkeypatch.setattr(nccl, "_group", noted)
    with by_gloo(comm) as (_, own):
        found, traffic = trained(own)
        assert (traffic.sent, traffic.reduced) == (expected.sent, expected.reduced)
        sent, reduced = (sum(getattr(each, name) for each in groups) for name in ("sent", "reduced"))
        assert sent == sum(expected.sent.values()) > 0
        assert reduced == sum(expected.reduced.values()) > 0
        for a, b in zip(found, by_mpi, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
            # Two summands have one sum.
            assert comm.size > 2 or torch.equal(a, b)
        for grad in found[1:]:
            assert len(set(comm.allgather(grad.numpy().tobytes()))) == 1


@pytest.mark.cpu
@pytest.mark.fault(98)
@pytest.mark.ranks(2)
def test_a_peer_whose_process_group_has_ended_is_an_error_where_it_is_waited_for(comm):
    with by_gloo(comm) as (channel, own):
        if own.rank == 0:
            channel.close()
            own.Barrier()
        else:
            own.Barrier()
            with pytest.raises(CommunicatorError, match=r"^gloo: .*losed by peer"):
                Reduction(own, torch.ones(3), "a sum").wait()
            assert not channel._groups


@pytest.mark.ranks(2, 3)
def test_what_goes_by_process_groups_does_so_in_replays(comm):
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with by_gloo(comm) as (_, own):

        def step(x):
            into = torch.empty_like(x)
            exchange = Exchange(own, [(after, x * 2)], [(before, into)], "a halo")
            total = allreduce(own, x.clone(), "a sum")
            exchange.wait()
            return total + into

        taken = capture(step, torch.ones(2))
        for turn in range(3):
            found = taken(torch.full((2,), float(own.rank + turn)))
            total = sum(rank + turn for rank in range(own.size))
            assert found.tolist() == [total + 2 * (before + turn)] * 2
        with pytest.raises(AssertionError, match="messages of MPI"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(nccl.Channel, "exchange", _refusing)
            taken(torch.ones(2))


def _refusing(*_):
    raise AssertionError("not by messages of MPI")


ENDS = """
    import torch
    import distconv as dc
    from mpi4py import MPI
    from distconv.communication.transport import Reduction, allreduce
    from tests.distconv.communication.by_gloo import by_gloo

    with by_gloo(MPI.COMM_WORLD) as (channel, comm):
        assert allreduce(comm, torch.ones(2), "a sum").tolist() == [2, 2]
        comm.rank or Reduction(comm, torch.ones(2), "a lone sum").wait()
        MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.long
@pytest.mark.fault(98)
@pytest.mark.ranks(1)
def test_a_sum_that_one_rank_does_not_come_to_ends_the_job(mpiexec):
    ended = mpiexec(2, ENDS, timeout=40, env={"DISTCONV_TIMEOUT_S": "1"})
    assert ended.returncode == 75
    assert "in a lone sum (by gloo)" in ended.stderr


# -- by NCCL, which is late --------------------------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.ranks(2, 3)
def test_the_watchdog_hears_of_the_oldest_work_that_the_gpu_has_had_for_too_long(comm, monkeypatch):
    monkeypatch.setattr(late_gpu, "IDLE_S", 60.0)
    with by("nccl", "late", comm) as (gpu, own):
        monkeypatch.setattr(nccl, "_overdue", lambda launch: True)
        assert not list(nccl._find_overdue_launches())
        first = Reduction(own, gpu.tensor(torch.ones(3)), "the first sum")
        second = Reduction(own, gpu.tensor(torch.ones(3)), "the second sum")
        ((_, what),) = nccl._find_overdue_launches()
        assert what() == "the first sum (by NCCL)"
        first.wait().cpu()
        ((_, what),) = nccl._find_overdue_launches()
        assert what() == "the second sum (by NCCL)"
        second.wait().cpu()
        assert not list(nccl._find_overdue_launches())


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_cuda_is_asked_neither_from_the_watchdogs_thread_in_time_nor_while_a_graph_is_captured(comm, monkeypatch):
    def asked(launch):
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(late_gpu, "IDLE_S", 60.0)
    with by("nccl", "late", comm) as (gpu, own):
        with monkeypatch.context() as patch:
            patch.setattr(nccl.Launch, "is_done", asked)
            sums = [Reduction(own, gpu.tensor(torch.ones(3)), "a sum")]
            gpu.capturing = True
            sums += [Reduction(own, gpu.tensor(torch.ones(3)), "a sum") for _ in range(3)]
            assert not list(nccl._find_overdue_launches())
            gpu.capturing = False
            with pytest.raises(AssertionError, match="CUDA was asked"):
                Reduction(own, gpu.tensor(torch.ones(3)), "a sum")
        for each in sums:
            assert each.wait().cpu().tolist() == [2] * 3


@pytest.mark.long
@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_a_message_does_not_wait_for_the_sums_that_were_launched_before_it(comm, monkeypatch):
    monkeypatch.setattr(late_gpu, "IDLE_S", 60.0)
    with by("nccl", "late", comm) as (gpu, own):
        peer = 1 - own.rank
        total, into = gpu.tensor(torch.ones(3)), gpu.tensor(torch.zeros(4, dtype=torch.float64))
        reduction = Reduction(own, total, "a sum of gradients")
        Exchange(own, [(peer, gpu.tensor(normal(4, seed=own.rank)))], [(peer, into)], "a halo").wait()
        assert torch.equal(into.cpu(), normal(4, seed=peer))
        assert not reduction._launch.is_done()
        assert reduction.wait().cpu().tolist() == [2] * 3


@pytest.mark.cpu
@pytest.mark.fault(98)
@pytest.mark.ranks(2)
def test_a_peer_that_was_lost_is_an_error_where_it_is_waited_for_and_the_gpu_is_set_free(comm):
    with by("nccl", "late", comm) as (gpu, own):
        reduction = Reduction(own, gpu.tensor(torch.ones(3)), "a sum")
        channel = CommunicatorRegistry.get(own).get_attached(device_transport.Transports)["cuda"].channel
        groups = list(channel._groups.values())
        channel._groups["sums"].lost = True
        with pytest.raises(CommunicatorError, match=r"^NCCL: NCCL error: unhandled system error$"):
            reduction.wait()
        assert [group.ended for group in groups] == ["aborted"] * 2
        assert not channel.launches


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_process_groups_of_a_communicator_that_is_gone_end_when_the_gpu_is_done(comm):
    with by("nccl", "late", comm) as (gpu, own):
        channel = CommunicatorRegistry.get(own).get_attached(device_transport.Transports)["cuda"].channel
        groups, total = list(channel._groups.values()), gpu.tensor(torch.ones(3))
        reduction = Reduction(own, total, "a sum")
        launch = channel.launches[-1]
        reduction.wait()
        del channel, reduction
        CommunicatorRegistry.get(own).get_attached(device_transport.Transports).clear()
        assert launch.is_done()
        assert [group.ended for group in groups] == ["shut down"] * 2
        assert total.cpu().tolist() == [2] * 3
