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


@pytest.mark.fault(21)
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


@pytest.mark.fault(20)
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.uint8, torch.complex64, torch.complex128),
    ],
)
def test_sums_over_ranks_are_those_of_torch(comm, dtype):
    parts = [(torch.arange(7) % 5 + rank).to(dtype) for rank in range(comm.size)]
    found = parts[comm.rank].clone()
    assert allreduce(comm, found, "a sum") is found
    wide = dtype if dtype.is_complex else torch.float64
    assert torch.equal(found, torch.stack(parts).to(wide).sum(0).to(dtype))


@pytest.mark.fault(21)
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.time_limit(600)
def test_more_than_two_to_the_31_bytes_and_elements_are_sent_and_summed(comm):
    count = (1 << 31) + 5
    ends = [0, 1 << 30, 1 << 31, count - 1]
    if comm.rank == 0:
        sent = torch.zeros(count, dtype=torch.uint8)
        sent[ends] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
        Exchange(comm, [(1, sent)], [], "a long message").wait()
    else:
        sent = torch.ones(count, dtype=torch.uint8)
        Exchange(comm, [], [(0, sent)], "a long message").wait()
    assert sent[ends].tolist() == [1, 2, 3, 4]
    assert int(sent.count_nonzero()) == 4
    allreduce(comm, sent, "a long sum")
    assert sent[ends].tolist() == [2, 4, 6, 8]
    assert int(sent.count_nonzero()) == 4


@pytest.mark.fault(21)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex128])
def test_a_sum_in_pieces_is_that_in_one(comm, monkeypatch, dtype):
    monkeypatch.setattr(transport, "_CHUNK_BYTES", 32)
    found = (torch.arange(7) + comm.rank).to(dtype)
    allreduce(comm, found, "a sum")
    assert torch.equal(found, (torch.arange(7) * comm.size + sum(range(comm.size))).to(dtype))


NOT_IN_MEMORY = {
    "a zero without storage": lambda: torch._efficientzerotensor((3, 2), dtype=torch.complex128),
    "a conjugate": lambda: torch.complex(normal(3, 2), normal(3, 2, seed=1)).conj(),
    "a negative": lambda: torch.complex(normal(3, 2), normal(3, 2, seed=1)).conj().imag,
}


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("kind", NOT_IN_MEMORY)
def test_what_torch_has_put_off_is_sent_and_summed_as_it_is(comm, kind):
    given = NOT_IN_MEMORY[kind]()
    received = torch.ones(3, 2, dtype=given.dtype)
    ring(comm, given, received)
    assert torch.equal(received, given.clone())
    total = given.clone() if given._is_zerotensor() else given
    assert torch.equal(allreduce(comm, total, "a sum"), NOT_IN_MEMORY[kind]().clone() * comm.size)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("numel", [3, 100_000])
def test_an_exchange_that_an_exception_cuts_off_leaves_nothing_for_the_next(comm, numel):
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for _ in range(3):
        with pytest.raises(ArithmeticError):
            _fails_under_way(comm, after, before, numel)
        received = torch.zeros(numel)
        ring(comm, torch.full((numel,), 1.0 + comm.rank), received)
        assert torch.equal(received, torch.full((numel,), 1.0 + before))


def _fails_under_way(comm, after, before, numel):
    exchange = Exchange(comm, [(after, torch.full((numel,), -1.0))], [(before, torch.zeros(numel))], "cut off")
    raise ArithmeticError(f"{exchange}")


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
