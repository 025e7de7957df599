"""Tensors of a GPU cross through memory that MPI may only use once the GPU has written it.

Without a GPU a stand-in plays one that writes as late as it can: what is read before it was waited for is NaN.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.communication import staging, transport
from distconv.communication.transport import Exchange, allreduce
from tests.distconv.layouts import grid_over, normal
from tests.layers.compare import same_as_one_process


class Late:
    """A GPU whose copies are made when they are waited for; its tensors are the CPU's."""

    direct = False

    def __init__(self):
        self.copies = []

    @classmethod
    def of(cls, tensors):
        return cls()

    def incoming(self, tensor):
        return tensor if self.direct else torch.full_like(tensor, torch.nan)

    def outgoing(self, tensor):
        buffer = torch.full_like(tensor, torch.nan)
        self.copies.append((buffer, tensor))
        return buffer

    def sealed(self):
        self.written = list(self.copies)

    def wait_until_written(self):
        for buffer, tensor in self.written:
            buffer.copy_(tensor)

    def deliver(self, tensor, buffer):
        if buffer is not tensor:
            tensor.copy_(buffer)

    def close(self):
        pass


class LateDirect(Late):
    """The same with an MPI that takes its memory."""

    direct = True


@pytest.fixture(params=[Late, LateDirect])
def late(request, monkeypatch):
    monkeypatch.setattr(transport, "Staging", request.param)


def neighbours(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


@pytest.mark.cpu
@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("backwards", [False, True])
def test_messages_arrive_in_the_order_they_were_made_however_they_are_waited_for(comm, late, backwards):
    after, before = neighbours(comm)
    received = [torch.zeros(4, dtype=torch.float64) for _ in range(3)]
    under_way = [
        Exchange(comm, [(after, normal(4, seed=10 * comm.rank + number))], [(before, into)], "a ring")
        for number, into in enumerate(received)
    ]
    for exchange in reversed(under_way) if backwards else under_way:
        exchange.wait()
    for number, into in enumerate(received):
        assert torch.equal(into, normal(4, seed=10 * before + number))


@pytest.mark.cpu
@pytest.mark.ranks(at_least=2)
def test_what_is_posted_arrives_while_nobody_waits(comm, late):
    after, before = neighbours(comm)
    sending = Exchange(comm, [(after, normal(4, seed=comm.rank))], [], "a message")
    sending.post()
    received = torch.zeros(4, dtype=torch.float64)
    Exchange(comm, [], [(before, received)], "a message").wait()
    assert torch.equal(received, normal(4, seed=before))
    sending.wait()


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_wait_for_what_they_add(comm, late, dtype):
    found = torch.full((5,), float(comm.rank + 1), dtype=dtype)
    assert allreduce(comm, found, "a sum") is found
    assert found.tolist() == [comm.size * (comm.size + 1) / 2] * 5


@pytest.mark.cpu
@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("axes", ["h", "w", "c", "n"])
def test_layers_equal_one_process_on_a_device_that_writes_late(comm, late, axes):
    def network(x, weight, scale):
        y = F.conv2d(x, weight, padding=1)
        y = F.batch_norm(y, None, None, scale, None, True)
        return F.max_pool2d(y.relu(), 3, 2, 1)

    grid = grid_over(comm, **{axes: comm.size})
    same_as_one_process(grid, network, normal(4, 4, 9, 8), plain=[normal(4, 4, 3, 3, seed=1), normal(4, seed=2)])


@pytest.mark.cpu
@pytest.mark.ranks(at_least=2)
def test_redistribution_and_its_way_back_change_no_bit(comm, late):
    x = normal(5, 6, 7)
    for axes in (("n", None, None), (None, "n", None), (None, None, "n")):
        dist = dc.Distribution(grid_over(comm, n=comm.size), axes)
        assert torch.equal(dc.gather(dc.scatter(x, dist)), x)


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
