"""Replays as a CUDA graph: what they leave, which is what eager steps do, and what is refused by name."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

import distconv as dc
from distconv.capture.graph import find_unsupported, fold_host_constants
from distconv.capture.operations import AllReduce, OperatorCall, Recording, Ref, Slot, SlotOrigin
from distconv.capture.run import record_run
from distconv.process.environment import TRANSPORT
from tests.distconv.capture.test_recorder import LAYERS, STEPS
from tests.distconv.capture.trained import (
    adam,
    assert_equal,
    batches,
    compare,
    make_step,
    network,
    sgd,
    training_state,
)

DEVICE = dc.device() if torch.cuda.is_available() else torch.device("cuda", 0)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS has no deterministic algorithms
PLACES = (((4, 4), DEVICE), ((4, 4), DEVICE), ((), torch.device("cpu")))


# -- of any machine: the tensors of a recording are said to be a GPU's ---------------------------------------------


def recording(function: Any, *args: Any) -> Recording:
    """Record ``function`` with ``args``. Results of 2 dimensions are marked as tensors on a GPU."""
    run = record_run(function, args)
    for slot in run.recording.slots:
        if len(slot.geometry[0]) == 2:
            slot.geometry = (*slot.geometry[:-1], DEVICE)
    return run.recording


def reasons(function: Any, *args: Any) -> str:
    return "; ".join(find_unsupported(recording(function, *args)))


def test_numbers_that_python_makes_are_on_the_gpu_before_a_replay():
    def step(x):
        return x * torch.tensor(0.5) * torch.tensor([2.0]).neg().reshape(()) + torch.arange(3).sum()

    record = recording(step, torch.ones(3, 2))
    assert not list(find_unsupported(record))
    rewritten = fold_host_constants(record)
    operators = [op for op in rewritten.operations if isinstance(op, OperatorCall)]
    assert [each.function.name() for each in operators] == ["aten::mul.Tensor", "aten::mul.Tensor", "aten::add.Tensor"]
    assert [rewritten.slots[each.args[1].slot].tensor.item() for each in operators] == [0.5, -2.0, 3]


def test_what_comes_from_the_host_is_made_anew_in_each_replay():
    """The step may write to it."""

    def step(x):
        line = torch.tensor([1.0, 2.0])  # on the host
        return x + line.view(1, 2)  # said to be on the GPU

    rewritten = fold_host_constants(recording(step, torch.ones(3, 2)))
    first, second = [op for op in rewritten.operations if isinstance(op, OperatorCall)]
    assert first.function is torch.ops.aten.clone.default
    assert rewritten.slots[first.args[0].slot].tensor.tolist() == [[1.0, 2.0]]
    assert second.function is torch.ops.aten.add.Tensor


def test_what_the_host_does_is_refused_by_name():
    held = torch.ones(())
    assert "a CPU tensor is used" in reasons(lambda x: x * held, torch.ones(2, 2))
    assert "a tensor is copied to the CPU" in reasons(lambda x: (x.sum(), x)[1], torch.ones(2, 2))
    assert "Clone it first" in reasons(lambda x: x.add_(1), torch.ones(2, 2))
    assert "computed there" in reasons(lambda x: x * torch.rand(()), torch.ones(2, 2))


def test_a_second_gpu_is_refused():
    record = recording(lambda x: x * 2, torch.ones(2, 2))
    record.slots[-1].geometry = (*record.slots[-1].geometry[:-1], torch.device("cuda", 1))
    assert "a CUDA graph has one device (cuda:0), but the step has tensors on cuda:0, cuda:1" in next(
        find_unsupported(record)
    )


def test_where_attention_drew_its_numbers_is_on_the_gpu_in_a_graph():
    attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
    slots = [Slot(SlotOrigin.EXISTING, n, (shape, (), 0, None, device)) for n, (shape, device) in enumerate(PLACES)]
    drawn = OperatorCall("here", attention, (Ref(0),), {}, [1, 2], False)
    assert not list(
        find_unsupported(Recording(slots, [drawn, OperatorCall("there", attention, (Ref(1), Ref(2)), {}, [], True)]))
    )
    drawn.function = torch.ops.aten.var_mean.default
    assert "is copied to the CPU" in next(find_unsupported(Recording(slots, [drawn])))


def test_messages_of_mpi_are_refused_with_the_way_out():
    run = recording(lambda x: x * 2, torch.ones(2, 2))
    run.operations.append(AllReduce("here", 0, MPI.COMM_SELF, 0, MPI.SUM, "a sum"))
    assert "DISTCONV_TRANSPORT=nccl" in next(find_unsupported(run))
    run.operations[-1] = replace(run.operations[-1], channel=object())
    assert not list(find_unsupported(run))


# -- of a GPU ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def grid():
    """One rank; kernels that add in a fixed order, for which all bits are compared."""
    torch.use_deterministic_algorithms(True)
    yield dc.ProcessGrid(MPI.COMM_SELF)
    torch.use_deterministic_algorithms(False)


def data(grid: Any, count: int, shape: tuple[int, ...] = (4, 2, 9, 8)) -> list[Any]:
    return batches(grid, count, shape, device=DEVICE)


def train_on_device(grid: Any, build: Any = network, given: Any = None, **more: Any) -> Any:
    """Compare captured steps with eager ones, all tensors on the GPU."""
    return compare(grid, lambda: build().to(DEVICE), given or data(grid, 6), **more)


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [name for name in LAYERS if name != "upsample"])  # torch adds in no order there
def test_layers_leave_what_eager_ones_do(grid, layers):
    train_on_device(grid, lambda: network(*LAYERS[layers]()))


@pytest.mark.gpu
@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_gradients_that_are_there_are_added_to(grid, optimizer, to_none):
    train_on_device(grid, optimizer=optimizer, to_none=to_none)


@pytest.mark.gpu
@pytest.mark.parametrize("make", STEPS)
def test_steps_of_other_kinds(grid, make):
    train_on_device(grid, make=make)


@pytest.mark.gpu
def test_plain_tensors_and_modules_and_a_generator_of_the_users_own(grid):
    x, results = torch.ones(6, 4, device=DEVICE), []
    for captured in (False, True):
        torch.manual_seed(2)
        generator = torch.Generator(DEVICE).manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to(DEVICE)

        def step(x, model=model, generator=generator):
            noise = torch.empty(4, device=DEVICE).normal_(generator=generator) + torch.rand_like(x)
            loss = model(x + noise).square().mean()
            loss.backward()
            return loss

        taken = dc.capture(step, x) if captured else step
        losses = []
        for _ in range(4):
            model.zero_grad()
            losses.append(taken(x).detach())
        results.append([*losses, *training_state(model), generator.get_state()])
    assert_equal(results[1], results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("ordered", [False, True])
def test_a_replay_with_other_numbers_is_refused(ordered):
    """In the lower half of the digits only where torch promises the same bits."""
    torch.use_deterministic_algorithms(ordered)
    try:
        for factor in (1.0001, 1.01):
            taken = dc.capture(lambda x: x * 3, torch.ones(4, device=DEVICE))
            (replay,) = taken._replays.values()
            replay._take = lambda *_, factor=factor: [torch.full((4,), 3 * factor, device=DEVICE)]
            refused = ordered or factor > 1.001
            expected = pytest.raises(dc.CaptureError, match="differs from the eager step") if refused else nullcontext()
            warned = (
                nullcontext() if ordered else pytest.warns(UserWarning, match="is not bitwise identical after a replay")
            )
            with warned, expected:
                taken(torch.ones(4, device=DEVICE))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_replays_keep_memory_and_lose_none(grid):
    model = dc.parallelize(network().to(DEVICE), grid)
    first, second = data(grid, 2)
    taken = dc.capture(make_step(model), *first)
    for _ in range(3):
        model.zero_grad()
        taken(*first)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(300):
        model.zero_grad()
        taken(*second)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 1024


BY_NCCL = TRANSPORT.value() == "nccl"


@pytest.mark.gpu
@pytest.mark.ranks(2)
@pytest.mark.skipif(not BY_NCCL, reason="messages go by MPI: DISTCONV_TRANSPORT=nccl")
@pytest.mark.parametrize("axis", ["n", "h", "c"])
def test_ranks_by_nccl_leave_what_eager_ones_do(comm, axis):
    grid = dc.ProcessGrid(comm, **{axis: comm.size})
    torch.use_deterministic_algorithms(True)
    try:
        train_on_device(grid, lambda: network(nn.Dropout(0.4)))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.ranks(2)
@pytest.mark.skipif(BY_NCCL, reason="messages go by NCCL")
def test_ranks_that_send_by_mpi_are_told_of_nccl(comm):
    grid = dc.ProcessGrid(comm, h=comm.size)
    model = dc.parallelize(network().to(DEVICE), grid)
    with pytest.raises(dc.CaptureError, match="DISTCONV_TRANSPORT=nccl"):
        dc.capture(make_step(model), *data(grid, 1)[0])
