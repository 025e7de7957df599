"""Messages and sums between ranks: every bit arrives, in pieces too, and bytes are counted by purpose."""

from __future__ import annotations

import pytest
import torch

from distconv.communication import transport
from distconv.communication.transport import Exchange, allreduce, counted
from tests.distconv.layouts import normal


def ring(comm, sent, received):
    """Send to the next rank, receive from the one before."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    Exchange(comm, [(after, sent)], [(before, received)], "a ring").wait()


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("chunk", [1 << 30, 64, 7])
def test_a_message_arrives_whole_in_pieces_of_any_length(comm, monkeypatch, chunk):
    monkeypatch.setattr(transport, "_CHUNK_BYTES", chunk)
    received = torch.zeros(5, 3, dtype=torch.float64)
    ring(comm, normal(5, 3, seed=comm.rank), received)
    assert torch.equal(received, normal(5, 3, seed=(comm.rank - 1) % comm.size))


@pytest.mark.ranks(2)
def test_messages_that_nothing_was_sent_for_can_be_given_up(comm):
    exchange = Exchange(comm, [], [(1 - comm.rank, torch.zeros(3))], "nothing")
    assert not exchange.done()
    comm.Barrier()
    exchange.cancel()
    comm.Barrier()
    received = torch.zeros(3)
    ring(comm, torch.full((3,), float(comm.rank)), received)
    assert received.tolist() == [1.0 - comm.rank] * 3


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]
)
def test_sums_over_ranks_are_those_of_torch(comm, dtype):
    parts = [(torch.arange(7) % 5 + rank).to(dtype) for rank in range(comm.size)]
    found = parts[comm.rank].clone()
    assert allreduce(comm, found, "a sum") is found
    assert torch.equal(found, torch.stack(parts).to(torch.float64).sum(0).to(dtype))


def test_bytes_are_counted_by_purpose_and_only_inside(comm):
    ones = torch.ones(5, dtype=torch.float64)
    allreduce(comm, ones.clone(), "before")
    with counted() as traffic:
        allreduce(comm, ones.clone(), "a sum")
        if comm.size > 1:
            ring(comm, ones, torch.zeros_like(ones))
    allreduce(comm, ones.clone(), "after")
    assert dict(traffic.reduced) == ({("a sum", comm.size): 40} if comm.size > 1 else {})
    assert dict(traffic.sent) == ({"a ring": 40} if comm.size > 1 else {})
