"""Gradients of ranks that call their layers in different orders, against one process."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from torch import nn

import distconv as dc
from tests.distconv.layouts import normal, raises_everywhere


class Branches(nn.Module):
    """Equal-shaped branches that each rank calls in an order of its own, another one in each pass."""

    def __init__(self, rank: int = 0, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = (nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4) if norm else nn.Tanh()) for _ in "abcd")
        self.branches = nn.ModuleDict(dict(zip("abcd", made, strict=True)))
        self.head = nn.Conv2d(4, 2, 1)
        self.double()
        self.rank, self.passes = rank, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        names = list(self.branches)
        random.Random(f"{self.rank} {self.passes}").shuffle(names)
        found = {name: self.branches[name](x) for name in names}
        return self.head(sum(factor * found[name].tanh() for factor, name in enumerate("abcd", start=1)))


def same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.ranks(2, 3, 4)
def test_gradients_are_matched_by_parameter_if_ranks_call_branches_in_different_orders(comm):
    """Also those that no_sync keeps for a later pass."""
    x = normal(5, 3, 7, 9)
    grid = dc.ProcessGrid(comm, n=comm.size)
    model, reference = dc.parallelize(Branches(comm.rank), grid), Branches()
    for turn in range(6):
        for each, given in ((model, dc.scatter(x, grid)), (reference, x)):
            with dc.no_sync() if turn == 4 and each is model else contextlib.nullcontext():
                if turn < 5:
                    each.zero_grad()
                each(given).square().mean().backward()
        if turn != 4:
            same_gradients(model, reference)
    grid.free()


@pytest.mark.ranks(2, 3)
def test_a_rank_that_leaves_a_layer_out_is_found_with_its_name(comm):
    x = normal(5, 3, 7, 9)
    grid = dc.ProcessGrid(comm, n=comm.size)
    torch.manual_seed(0)
    layers = nn.ModuleDict({name: nn.Conv2d(3, 3, 1) for name in ("always", "sometimes")}).double()
    dc.parallelize(layers, grid)

    def step() -> None:
        y = layers["always"](dc.scatter(x, grid))
        (layers["sometimes"](y) if comm.rank == 0 else y).square().mean().backward()

    text = raises_everywhere(comm, dc.MismatchError, "gradients of different parameters", step)
    assert "sometimes.weight, sometimes.bias on rank 0" in text
    grid.free()


@pytest.mark.ranks(2, 3)
def test_a_rank_that_leaves_a_layer_out_after_some_steps_is_found_in_the_same_pass(comm):
    """Other ranks have started reductions by then, which this rank has not, so that the grid cannot be used again."""
    x = normal(5, 3, 7, 9)
    grid = dc.ProcessGrid(comm, n=comm.size)
    torch.manual_seed(0)
    layers = dc.parallelize(nn.ModuleList([nn.Conv2d(3, 3, 1) for _ in range(3)]).double(), grid)
    given = dc.scatter(x, grid)

    def step(left_out: int | None = None) -> None:
        y = given
        for number, layer in enumerate(layers):
            y = y if number == left_out else layer(y)
        y.square().mean().backward()

    for left_out in (None, 1, None, 2, None, None):  # the same on all ranks
        step(left_out)
    text = raises_everywhere(
        comm, dc.MismatchError, "gradients of different parameters", lambda: step(1 if comm.rank == 0 else None)
    )
    assert "1.weight, 1.bias on rank 1" in text or "1.bias, 1.weight on rank 1" in text
    raises_everywhere(comm, dc.CommunicatorError, "an earlier one failed", step)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(("axis", "norm"), [("h", False), ("n", True)])
def test_the_first_pass_names_the_layers_that_ranks_exchange_data_between(comm, axis, norm):
    grid = dc.ProcessGrid(comm, **{axis: comm.size})
    model = dc.parallelize(Branches(comm.rank, norm), grid)
    x = dc.scatter(normal(5, 3, 7, 9), grid)
    text = raises_everywhere(comm, dc.MismatchError, "ranks are at different operations", lambda: model(x))
    assert len({name for name in "abcd" if f"'branches.{name}.{int(norm)}'" in text}) > 1
    grid.free()


@pytest.mark.ranks(2, 3)
def test_gradients_that_are_summed_at_once_name_the_layers_of_each_rank(comm):
    """Without parallelize nothing is known of the parameters, so only the order can match them."""
    grid = dc.ProcessGrid(comm, n=comm.size)
    model = Branches(comm.rank)
    loss = model(dc.scatter(normal(5, 3, 7, 9), grid)).square().mean()
    text = raises_everywhere(comm, dc.MismatchError, "ranks are at different operations: sum over n", loss.backward)
    assert len({name for name in "abcd" if f"'branches.{name}.0'" in text}) > 1
    grid.free()
