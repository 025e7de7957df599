"""Dropout: on any grid, the mask and the random numbers that are used equal those of one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import distconv as dc
from distconv.communication import agreement
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere, twenty_layouts
from tests.layers.compare import UP_TO_SIX_RANKS, close, same_as_one_process

SHAPE = (3, 4, 7, 5)


def seeded(function):
    """Call ``function`` after the same seed, and draw a number after it, which shows how many it used."""

    def call(*tensors):
        torch.manual_seed(3)
        return function(*tensors) + torch.rand((), dtype=torch.float64)

    return call


@pytest.mark.parametrize("function", [F.dropout, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout])
@pytest.mark.parametrize("p", [0.3, 0.5, 0.0, 1.0])
@UP_TO_SIX_RANKS
def test_dropout_equals_one_process(comm, function, p):
    for grid in grids(comm, "ch"):
        same_as_one_process(grid, seeded(lambda x: function(x, p, True)), normal(*SHAPE))


@pytest.mark.parametrize("train", [True, False])
@UP_TO_SIX_RANKS
def test_native_dropout_gives_the_mask_of_one_process(comm, train):
    for grid in grids(comm, "ch"):
        for result in (0, 1):
            call = seeded(lambda x, result=result: torch.native_dropout(x, 0.4, train)[result])
            same_as_one_process(grid, call, normal(*SHAPE))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.dropout(x, 0.4, True),
        lambda x: torch.feature_dropout(x, p=0.4, train=True),
        lambda x: torch.alpha_dropout_(x * 1, 0.4, True),
        lambda x: torch.feature_alpha_dropout_(x * 1, 0.4, True),
    ],
)
def test_torchs_own_names_do_the_same(comm, function):
    for grid in grids(comm, "nh"):
        same_as_one_process(grid, seeded(function), normal(*SHAPE))


def test_dropout_outside_training_is_the_identity(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    for module in (nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout(), nn.FeatureAlphaDropout()):
        assert module.eval()(x) is x


@pytest.mark.parametrize("training", [True, False])
def test_rrelu_equals_one_process(comm, training):
    for grid in grids(comm, "ch"):
        for call in (F.rrelu, lambda x, *options: F.rrelu_(x * 2, *options)):
            same_as_one_process(grid, seeded(lambda x, call=call: call(x, 0.1, 0.4, training)), normal(*SHAPE))


def test_any_layout_will_do_and_ranks_without_elements_take_part(comm):
    for dist in twenty_layouts(comm, (5, 7, 3))[::2]:
        same_as_one_process(dist, seeded(lambda x: F.dropout(x, 0.4)), normal(5, 7, 3))
    for grid in grids(comm, "nch"):
        same_as_one_process(grid, seeded(lambda x: F.dropout2d(x, 0.4)), normal(1, 2, 1, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_equal_one_process_to_the_last_bit(comm, dtype):
    x = normal(*SHAPE).to(dtype)
    for function in (F.dropout, F.alpha_dropout):
        torch.manual_seed(3)
        expected = function(x, 0.3, True)
        torch.manual_seed(3)
        assert torch.equal(dc.gather(function(dc.scatter(x, grid_over(comm, h=comm.size)), 0.3, True)), expected)


def test_a_checkpoint_drops_the_same_elements_again(comm):
    def run(x):
        return checkpoint(lambda x: F.dropout(x.exp(), 0.5) ** 2, x, use_reentrant=False)

    for grid in grids(comm, "nch"):
        same_as_one_process(grid, seeded(run), normal(*SHAPE))


@pytest.mark.ranks(at_least=2)
def test_the_check_of_seeds_can_be_left_out(comm, monkeypatch):
    monkeypatch.setattr(agreement, "level", "off")
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    torch.manual_seed(comm.rank)
    expected = F.dropout(normal(*SHAPE), 0.5)
    torch.manual_seed(comm.rank)
    rows = x.box()[2]
    close(F.dropout(x, 0.5).local, expected[:, :, rows.start : rows.stop], "this rank's own mask")


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: F.dropout(x, 1.5), "dropout probability has to be between 0 and 1, but got 1.5"),
        (lambda x: F.dropout1d(x, 0.5), "Expected 2D or 3D input"),
        (lambda x: torch.dropout(x, -1.0, True), "dropout probability has to be between 0 and 1"),
    ],
)
def test_arguments_that_torch_rejects_raise_its_error(comm, call, match):
    with pytest.raises((RuntimeError, ValueError), match=match):
        call(normal(*SHAPE))
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    raises_everywhere(comm, dc.ShapeError, match, lambda: call(x))
