"""Weights that come apart between ranks are noticed in the next backward pass, with their name and the ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.communication import agreement, gradient_reduction
from distconv.communication.weight_digest import (
    ROUNDS,
    UNSPLIT_ELEMENTS,
    checksum_payload,
    is_same_on_all_ranks,
    select_chunk,
)
from tests.distconv.layouts import grid_over, normal, raises_everywhere

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64]


def summed(weights: list[torch.Tensor], turn: int = 0) -> list[float]:
    """Return the digests of ranks with these weights, summed in float32 as NCCL and MPI do."""
    rode = [checksum_payload([weight], turn, len(weights)) for weight in weights]
    return torch.stack(rode).sum(0).tolist()


@pytest.mark.parametrize("ranks", [2, 3, 7, 64, 1000])
def test_the_same_weights_are_alike_and_one_that_differs_is_found(ranks):
    weight = torch.randn(5, 3, 3, generator=torch.Generator().manual_seed(ranks))
    assert is_same_on_all_ranks(summed([weight] * ranks), ranks)
    for place, value in ((0, torch.inf), (44, weight.view(-1)[44].nextafter(torch.tensor(9.0))), (7, torch.nan)):
        other = weight.clone()
        other.view(-1)[place] = value
        for rank in {0, 1, ranks - 1}:
            copies = [other if each == rank else weight for each in range(ranks)]
            assert not is_same_on_all_ranks(summed(copies), ranks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 4, 16, 1024])
def test_constants_that_differ_are_found(dtype, numel):
    for one, other in itertools.combinations((0.0, 0.5, 1.0, 2.0, -1.0), 2):
        weights = [torch.full((numel,), value).to(dtype) for value in (one, other)]
        assert not is_same_on_all_ranks(summed(weights), 2), (one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 3, 8, UNSPLIT_ELEMENTS, UNSPLIT_ELEMENTS + 1, 5 * UNSPLIT_ELEMENTS + 3])
def test_every_element_has_its_turn(dtype, numel):
    weight = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    for place in {0, numel // 2, numel - 1}:
        other = weight.clone()
        other[place] = -other[place]
        turns = [
            turn for turn in range(ROUNDS) if not torch.equal(select_chunk(weight, turn), select_chunk(other, turn))
        ]
        assert len(turns) == (ROUNDS if numel <= UNSPLIT_ELEMENTS else 1)
        for turn in range(ROUNDS):
            assert is_same_on_all_ranks(summed([weight, other], turn), 2) == (turn not in turns)


def training(comm, dtype=torch.float64, **axes):
    torch.manual_seed(0)
    grid = grid_over(comm, **axes)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(dtype)
    model = dc.parallelize(model, grid)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def backward() -> None:
        optimizer.zero_grad()
        model(dc.scatter(normal(4, 4, 9, 8).to(dtype), grid)).abs().square().mean().backward()

    return model, optimizer, backward


@pytest.mark.fault(104)
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("axis", ["n", "h"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_step_that_one_rank_skips_is_found_in_the_next(comm, axis, dtype):
    model, optimizer, backward = training(comm, dtype, **{axis: comm.size})
    for _ in range(2):
        backward()
        optimizer.step()
    backward()
    if comm.rank != 1:
        optimizer.step()
    text = raises_everywhere(comm, dc.MismatchError, "no longer the same on all ranks", backward)
    others = ", ".join(str(rank) for rank in range(comm.size) if rank != 1)
    assert f"one on rank {others}, another one on rank 1" in text
    assert any(f"the first is '{name}'" in text for name in dict(model.named_parameters()))


@pytest.mark.ranks(4)
def test_blocks_of_sharded_weights_are_compared_where_there_are_several(comm):
    model, optimizer, backward = training(comm, n=2, c=2)
    backward()
    optimizer.step()
    if comm.rank == 3:
        model[0].weight.local.data[0, 0, 0, 0] += 1e-9

    def compared() -> None:
        # Ranks 1 and 3 have this block and find it; the others hear of it here.
        agreement.try_on_all_ranks(comm, backward, dc.MismatchError)

    text = raises_everywhere(comm, dc.MismatchError, "'0.weight'", compared)
    assert "one on rank 1, another one on rank 3" in text


@pytest.mark.ranks(3)
def test_ranks_may_have_had_other_passes_with_others_before(comm):
    """A weight that is looked at in parts: ranks must take the same part."""
    pair = comm.Split(comm.rank < 2)
    for ranks in [pair] * (comm.rank < 2) + [comm]:
        grid = dc.ProcessGrid(ranks, n=ranks.size)
        model = dc.parallelize(nn.Linear(100, 3 * UNSPLIT_ELEMENTS // 100).double(), grid, broadcast=True)
        for _ in range(2):
            model(dc.scatter(normal(6, 100), grid)).sum().backward()
        grid.free()
    pair.Free()


@pytest.mark.ranks(2)
def test_weights_that_are_the_same_pass_and_gradients_are_as_without(comm, monkeypatch):
    found = []
    for level in ("plan", "off"):
        monkeypatch.setattr(agreement, "level", level)
        model, optimizer, backward = training(comm, n=2)
        for _ in range(ROUNDS + 2):
            backward()
            optimizer.step()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dense", [True, False])
def test_what_rides_again_and_again_is_of_the_weights_as_they_are(comm, dense):
    """A replay asks the same object in each step, whose weights have changed meanwhile, in their memory."""
    weights = [torch.rand(5000), torch.rand(3, 4), torch.rand(6, 4)[:, ::2] if not dense else torch.rand(6, 2)]
    again = gradient_reduction._ChecksumPayload(comm, True)
    for _ in range(2 * ROUNDS):
        found, expected = again(*weights), gradient_reduction._ChecksumPayload(comm, False)(*weights)
        assert torch.equal(found, expected)
        for weight in weights:
            weight.add_(torch.rand(weight.shape))


@pytest.mark.ranks(2)
def test_nothing_rides_where_nothing_is_to_be_compared(comm, monkeypatch):
    monkeypatch.setattr(agreement, "level", "off")
    monkeypatch.setattr(gradient_reduction, "select_chunks", lambda *_: pytest.fail("a digest was computed"))
    _, optimizer, backward = training(comm, n=2)
    backward()
    optimizer.step()


@pytest.mark.long
@pytest.mark.fault(105)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("late", [20, 23, 26])
@pytest.mark.parametrize("what", [0, 1])
def test_a_batch_that_differs_late_is_found_within_ten_steps(comm, late, what):
    grid = grid_over(comm, n=comm.size)
    for step in itertools.count():
        batch = [torch.full((4, 2, 3), float(step)), torch.full((4, 3), step)]
        if step >= late and comm.rank == 1:
            batch[what] += 1
        try:
            F.mse_loss(*(dc.scatter(x, grid, dims="n" + "cw"[: x.dim() - 1]).float().mean() for x in batch))
        except dc.MismatchError:
            break
    assert late <= step < late + 10
