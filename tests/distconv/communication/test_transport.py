"""Messages and sums between ranks: every bit arrives, in pieces too, and bytes are counted by purpose."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.communication import transport
from distconv.communication.transfer import transfer_plan
from distconv.communication.transport import Exchange, Reduction, allreduce, count_traffic
from distconv.kernels.convolution import Geometry
from distconv.layers.common.input_windows import window_needs
from tests.distconv.communication.late_transports import CASES, by
from tests.distconv.layouts import cut, normal
from tests.harness.late_libraries import LateCupy
from tests.layers.compare import same_as_one_process


def ring(comm, sent, received):
    """Send to the next rank, receive from the one before."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    exchange = Exchange(comm, [(after, sent)], [(before, received)], "a ring")
    exchange.wait()
    assert [buffer.data_ptr() for buffer in exchange.received_buffers] == [received.data_ptr()]


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
    assert not exchange.is_done()
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
    with count_traffic() as traffic:
        allreduce(comm, ones.clone(), "a sum")
        if comm.size > 1:
            ring(comm, ones, torch.zeros_like(ones))
    allreduce(comm, ones.clone(), "after")
    assert dict(traffic.reduced) == ({("a sum", comm.size): 40} if comm.size > 1 else {})
    assert dict(traffic.sent) == ({"a ring": 40} if comm.size > 1 else {})


# -- from a GPU, which is late: by all transports ----------------------------------------------------------------------


@pytest.fixture(params=CASES, ids=", ".join)
def late(request, comm):
    with by(*request.param, comm) as found:
        yield found


def neighbours(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def large(seed):
    """More than MPI copies away at once."""
    return normal(300, 300, seed=seed)


@pytest.mark.cpu
@pytest.mark.ranks(at_least=2, at_most=4)
def test_a_message_waits_for_what_writes_it_and_for_who_reads_its_memory(late):
    gpu, comm = late
    after, before = neighbours(comm)
    received = gpu.tensor(torch.full((300, 300), -1.0, dtype=torch.float64))
    old = received * 1
    exchange = Exchange(comm, [(after, gpu.tensor(large(comm.rank)) * 2)], [(before, received)], "a ring")
    exchange.wait()
    del exchange
    new = received * 1
    received.zero_()
    assert torch.equal(new.cpu(), large(before) * 2)
    assert (old.cpu() == -1).all()


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_a_message_that_comes_early_is_not_written_over_what_kernels_still_read(late):
    gpu, comm = late
    received = gpu.tensor(torch.full((4,), -1.0, dtype=torch.float64))
    old = received * 1
    sent = [(1, gpu.tensor(normal(4)))] if comm.rank == 0 else []
    exchange = Exchange(comm, sent, [(0, received)] if comm.rank else [], "a message")
    if comm.rank == 0:
        exchange.post()
    comm.Barrier()
    exchange.wait()
    assert (old.cpu() == -1).all()
    assert comm.rank == 0 or torch.equal((received * 1).cpu(), normal(4))


@pytest.mark.cpu
@pytest.mark.ranks(at_least=2, at_most=4)
@pytest.mark.parametrize("backwards", [False, True])
def test_messages_arrive_in_the_order_they_were_made_however_they_are_waited_for(late, backwards):
    gpu, comm = late
    after, before = neighbours(comm)
    received = [gpu.tensor(torch.zeros(4, dtype=torch.float64)) for _ in range(3)]
    under_way = [
        Exchange(comm, [(after, gpu.tensor(normal(4, seed=10 * comm.rank + i)))], [(before, into)], "a ring")
        for i, into in enumerate(received)
    ]
    for exchange in reversed(under_way) if backwards else under_way:
        exchange.wait()
    for i, into in enumerate(received):
        assert torch.equal(into.cpu(), normal(4, seed=10 * before + i))


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_what_was_sent_and_forgotten_arrives(late):
    gpu, comm = late
    into = gpu.tensor(torch.zeros(300, 300, dtype=torch.float64))
    sent = [(1 - comm.rank, gpu.tensor(large(comm.rank)))]
    exchange = Exchange(comm, sent, [(1 - comm.rank, into)], "a message")
    if comm.rank == 0:
        exchange.post()
        del exchange, into, sent
    else:
        exchange.wait()
        assert torch.equal(into.cpu(), large(0))
    comm.Barrier()
    total = allreduce(comm, gpu.tensor(torch.ones(3)), "a sum")
    assert total.cpu().tolist() == [2] * 3
    gpu.synchronize()
    transport._abandoned[:] = [each for each in transport._abandoned if not each.is_done()]
    assert not transport._abandoned


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_who_asks_whether_a_message_is_there_may_use_it_when_it_is(late):
    gpu, comm = late
    into = gpu.tensor(torch.zeros(300, 300, dtype=torch.float64))
    exchange = Exchange(comm, [(1 - comm.rank, gpu.tensor(large(comm.rank)))], [(1 - comm.rank, into)], "a message")
    while not exchange.is_done():
        gpu.synchronize()
    exchange.wait()
    assert torch.equal(into.cpu(), large(1 - comm.rank))


@pytest.mark.cpu
@pytest.mark.ranks(at_most=4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.complex64])
def test_a_sum_waits_for_what_it_adds_and_what_follows_waits_for_it(late, dtype):
    gpu, comm = late
    mine = gpu.tensor(torch.full((300, 30), comm.rank + 1).to(dtype))
    old = mine * 1
    assert allreduce(comm, mine, "a sum") is mine
    new = mine * 1
    mine.zero_()
    assert (old.cpu() == comm.rank + 1).all()
    assert (new.cpu() == comm.size * (comm.size + 1) / 2).all()


@pytest.mark.cpu
@pytest.mark.ranks(at_least=2, at_most=4)
def test_sums_and_messages_under_way_together(late):
    gpu, comm = late
    after, before = neighbours(comm)
    received, totals = gpu.tensor(large(9)), [gpu.tensor(torch.full((500,), comm.rank + 1.0)) for _ in range(2)]
    first = Reduction(comm, totals[0], "a sum")
    exchange = Exchange(comm, [(after, gpu.tensor(large(comm.rank)))], [(before, received)], "a ring")
    second = Reduction(comm, totals[1] * 1, "a sum")
    found = second.wait() * 1
    exchange.wait()
    first.wait()
    expected = comm.size * (comm.size + 1) / 2
    assert torch.equal((received * 1).cpu(), large(before))
    assert (found.cpu() == expected).all()
    assert (totals[0].cpu() == expected).all()


@pytest.mark.cpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_sum_of_one_stream_that_another_one_waits_for_lasts_until_it_was_read(late, dtype):
    gpu, comm = late
    with torch.cuda.stream(torch.cuda.Stream()):
        reduction = Reduction(comm, gpu.tensor(torch.ones(300, dtype=dtype)), "a sum")
    found = reduction.wait() * 1
    del reduction
    assert (found.cpu() == 2).all()


@pytest.mark.cpu
@pytest.mark.ranks(2, 4)
def test_a_halo_and_its_way_back_are_packed_by_one_kernel_each(late):
    gpu, comm = late
    grid = dc.ProcessGrid(comm, h=2, w=comm.size // 2)
    base = dc.Distribution(grid, ("n", None, "h", "w"))
    shape = (2, 3, 9, 7)
    plan = transfer_plan(
        base, window_needs(base, shape, shape, Geometry(*((n, n) for n in (3, 1, 1, 1)))), shape, ghosts=True
    )
    x = cut(normal(*shape), base)
    expected = plan.start(x).finish()
    back = [normal(*part.shape, seed=7) for part in expected]
    total = plan.start_accumulate(back, x).finish(torch.ones_like(x))
    for memory_format in (torch.contiguous_format, torch.channels_last):
        late_x = gpu.tensor(x.contiguous(memory_format=memory_format))
        plan.start(late_x).finish()  # the kernel is tried at the first time
        for tries in range(2):
            launches = LateCupy.launches
            found = plan.start(late_x).finish()
            assert LateCupy.launches - launches <= 2
            for part, values in zip(found, expected, strict=True):
                assert torch.equal((part * 1).cpu(), values), tries
            sums = plan.start_accumulate([gpu.tensor(b) for b in back], late_x).finish(torch.ones_like(late_x))
            assert LateCupy.launches - launches <= 4
            assert torch.equal((sums * 1).cpu(), total)


@pytest.mark.cpu
@pytest.mark.ranks(2, 3)
def test_layers_equal_one_process(late):
    gpu, comm = late

    def network(x, weight):
        return F.max_pool2d(F.conv2d(x, weight, padding=1).relu(), 3, 2, 1)

    grid = dc.ProcessGrid(comm, h=comm.size)
    same_as_one_process(grid, network, gpu.tensor(normal(4, 4, 9, 8)), plain=[gpu.tensor(normal(4, 4, 3, 3, seed=1))])


@pytest.mark.ranks(at_least=2)
def test_every_wait_is_known_to_the_watchdog(comm, monkeypatch):
    known = []

    @contextlib.contextmanager
    def waiting(describe):
        known.append(describe())
        yield

    monkeypatch.setattr(transport.watchdog, "waiting", waiting)
    received = torch.zeros(5, 3, dtype=torch.float64)
    ring(comm, normal(5, 3, seed=comm.rank), received)
    Reduction(comm, torch.ones(3), "a sum").wait()
    assert len(known) == 2 and "a ring" in known[0] and known[1] == f"a sum over {comm.size} ranks"
