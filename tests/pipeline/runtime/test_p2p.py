"""Messages between ranks of two stages: any shapes and dtypes, in any order of sizes."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from distconv.communication import transport
from distconv.errors import PipelineError
from distconv.pipeline.runtime import message_header, p2p
from distconv.pipeline.runtime.message_header import DTYPES
from distconv.pipeline.runtime.p2p import P2P
from distconv.pipeline.runtime.placement import StagePlacement
from distconv.pipeline.schedules.actions import Kind, Message
from distconv.pipeline.stage.stage_inputs import Minibatch
from distconv.pipeline.stage.structures import Boundary, flatten
from distconv.tensor import DistTensor
from tests.distconv.layouts import normal
from tests.harness.late_gpu import DEVICE, LateGpu
from tests.harness.late_libraries import late_gpu

SHAPES = ((), (0,), (1,), (3, 4), (2, 3, 5), (100, 100), (0, 3, 2), (7,), (300, 200), (2, 2))


def messages(comm, device=None):
    placement = StagePlacement(comm.size, (1,) * comm.size)
    return P2P(comm, placement, placement.positions[comm.rank], None, device or torch.empty(0).device)


def assert_same(found, expected):
    return found.dtype is expected.dtype and found.shape == expected.shape and torch.equal(found, expected)


def send_to_next(comm, box, step, values, loss=0.5):
    """Send ``values`` from each rank to the next, and return what arrives from the one before."""
    if comm.rank < comm.size - 1:
        box.send(
            Message(Kind.F, step, comm.rank + 1),
            comm.rank + 1,
            Minibatch(step, 4),
            Boundary(values),
            loss=loss,
            what="a test",
        )
    if comm.rank == 0:
        return None
    boundary, loss = box.receive(Message(Kind.F, step, comm.rank), comm.rank - 1, Minibatch(step, 4), "a test")
    return boundary.tensors, loss


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("limit", [None, 1000])
def test_messages_that_grow_and_shrink_arrive(comm, monkeypatch, limit):
    if limit is not None:  # as if messages were longer than MPI takes, and than a receive may stand
        monkeypatch.setattr(transport, "_CHUNK_BYTES", message_header.HEADER_BYTES + limit)
        monkeypatch.setattr(p2p, "POSTED_BYTES", limit)
    box = messages(comm)
    for step, shape in enumerate(SHAPES * 2):
        values = [normal(*shape, seed=step), None, torch.full((2, 2), step)]
        arrived = send_to_next(comm, box, step, values, loss=step / 3)
        if arrived is not None:
            (found, none, number), loss = arrived
            assert assert_same(found, values[0])
            assert none is None
            assert assert_same(number, values[2])
            assert loss == step / 3
    box.close()


def test_a_standing_receive_is_one_message():
    # Of two receives a shorter message would fill only the first.
    assert message_header.HEADER_BYTES + p2p.POSTED_BYTES <= transport._CHUNK_BYTES


@pytest.mark.ranks(2)
def test_every_dtype_arrives(comm):
    box = messages(comm)
    values = [normal(3, 5).mul(3).to(dtype) for dtype in DTYPES]
    arrived = send_to_next(comm, box, 0, values)
    if arrived is not None:
        assert all(assert_same(found, value) for found, value in zip(arrived[0], values, strict=True))
    box.close()


@pytest.mark.ranks(2)
def test_a_tensor_of_any_strides_arrives(comm):
    box = messages(comm)
    x = normal(4, 3, 5, 2)
    values = [x.transpose(0, 2), x[1:, ::2], x[:1].expand(6, -1, -1, -1), x.to(memory_format=torch.channels_last)]
    values += [x[:, :1].to(memory_format=torch.channels_last), x[0, 0, 0, 0]]
    arrived = send_to_next(comm, box, 0, values)
    if arrived is not None:
        for found, value in zip(arrived[0], values, strict=True):
            assert assert_same(found, value)
            assert found.stride() == value.clone().stride()
    box.close()


@pytest.mark.ranks(2)
def test_what_is_sent_may_change_at_once_and_many_messages_wait_in_order(comm):
    box = messages(comm)
    if comm.rank == 0:
        x = torch.zeros(50, 50)
        for step in range(20):
            sent = Boundary([x[: 1 + step * 7 % 50]])
            box.send(Message(Kind.F, step, 1), 1, Minibatch(step, 4), sent, loss=0.0, what="a test")
            x += 1
    comm.Barrier()
    if comm.rank == 1:
        for step in range(20):
            (((found,), _), _) = box.receive(Message(Kind.F, step, 1), 0, Minibatch(step, 4), "a test")
            assert assert_same(found, torch.full((1 + step * 7 % 50, 50), float(step)))
    box.close()


@pytest.mark.ranks(2)
def test_what_has_arrived_stays_when_the_next_message_comes(comm):
    box = messages(comm)
    kept = [send_to_next(comm, box, step, [torch.full((6,), step)]) for step in range(5)]
    if comm.rank == 1:
        assert [values[0].tolist() for values, _ in kept] == [[step] * 6 for step in range(5)]
    box.close()


@pytest.mark.ranks(2)
def test_activations_and_gradients_between_two_ranks_do_not_mix(comm):
    box, other = messages(comm), 1 - comm.rank
    payload = Kind.F if comm.rank == 0 else Kind.B
    for payload, source in ((Kind.F, 0), (Kind.B, 1)):
        if comm.rank == source:
            box.send(
                Message(payload, 0, other),
                other,
                Minibatch(0, 4),
                Boundary([torch.tensor([source])]),
                loss=0.0,
                what="a test",
            )
    comm.Barrier()
    payload = Kind.B if comm.rank == 0 else Kind.F
    (((found,), _), _) = box.receive(Message(payload, 0, comm.rank), other, Minibatch(0, 4), "a test")
    assert found.tolist() == [other]
    box.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("number", "sent", "expected", "words"),
    [
        (3, Minibatch(8, 4), Minibatch(7, 4), r"step 7 from rank 0, but that sends F of micro-batch 3 of step 8"),
        (0, Minibatch(0, 6), Minibatch(0, 5), "rank 0 has a mini-batch of 6 samples, but this rank has 5 samples"),
        (0, Minibatch(0, 6, True), Minibatch(0, 6), "of 6 samples that require a gradient, but this rank has 6"),
    ],
    ids=["another step", "other samples", "with a gradient"],
)
def test_a_message_of_another_mini_batch_is_an_error_that_names_both(comm, number, sent, expected, words):
    box, message = messages(comm), Message(Kind.F, number, 1)
    if comm.rank == 0:
        box.send(message, 1, sent, Boundary([torch.ones(2)]), loss=0.0, what="a test")
    else:
        with pytest.raises(PipelineError, match=words):
            box.receive(message, 0, expected, "a test")
    box.close()


@pytest.mark.ranks(2)
def test_the_structure_around_tensors_arrives(comm):
    box, message, batch = messages(comm), Message(Kind.F, 0, 1), Minibatch(0, 2)
    value = {"x": (torch.ones(2, 3), None), "size": (3, 4.5, "area"), "mask": [torch.tensor([True, False])]}
    if comm.rank == 0:
        box.send(message, 1, batch, flatten(value, "x"), loss=0.0, what="a test")
    else:
        found = box.receive(message, 0, batch, "a test")[0].value()
        assert list(found) == list(value) and found["size"] == value["size"] and found["x"][1] is None
        assert torch.equal(found["x"][0], value["x"][0]) and torch.equal(found["mask"][0], value["mask"][0])
    box.close()


@pytest.mark.ranks(3)
def test_ranks_of_a_stage_that_send_different_tensors_are_an_error(comm):
    placement = StagePlacement(3, (1, 1), [{"h": 2}, None])
    group = comm.Split(int(comm.rank == 2))
    grid = None if comm.rank == 2 else dc.ProcessGrid(group, h=2)
    box = P2P(comm, placement, placement.positions[comm.rank], grid, torch.empty(0).device)
    message = Message(Kind.F, 0, 1)
    if grid is None:
        with pytest.raises(PipelineError, match="the ranks of stage 0 send different tensors"):
            box.receive(message, 0, Minibatch(0, 1), "a test")
    else:
        dtype = (torch.float32, torch.int32)[comm.rank]
        block = torch.ones(1, 1, 2, 4, dtype=dtype)
        value = DistTensor(block, dc.Distribution(grid, "nchw"), (1, 1, 4, 4))
        box.send(message, 1, Minibatch(0, 1), Boundary([value]), loss=0.0, what="a test")
    box.close()


@pytest.mark.cpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize("order", LateGpu.ORDERS)
@pytest.mark.parametrize(("transport", "waits"), [("host", (1, 0)), ("cuda-aware", (1, 2))])
def test_messages_from_a_gpu_arrive_and_the_host_waits_for_it_once_where_they_go_by_the_host(
    comm, monkeypatch, transport, waits, order
):
    monkeypatch.setenv("DISTCONV_TRANSPORT", transport)
    with late_gpu(order) as gpu:
        box = messages(comm, DEVICE)
        for step, shape in enumerate([(30, 40)] + [(20, 40)] * 3):
            before = gpu.host_waits
            arrived = send_to_next(comm, box, step, [gpu.tensor(normal(*shape, seed=step)) * 2, None], loss=step / 3)
            if step:  # the first is longer than the receive that stands
                assert gpu.host_waits - before == waits[comm.rank]
            if arrived is not None:
                (found, none), loss = arrived
                assert torch.equal((found * 1).cpu(), normal(*shape, seed=step) * 2)
                assert (none, loss) == (None, step / 3)
        box.close()
