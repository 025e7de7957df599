"""Recurrent modules of torch and of distconv on DistTensors split in samples and time, against one process."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.recurrent.modules import KINDS, SMALL, gradients, torch_and_scan_modules

RANKS = pytest.mark.ranks(at_most=6)


class Packed(nn.Module):
    """A layer that is given sequences of several lengths."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y, last = self.layer(pack_padded_sequence(x, torch.tensor([7, 2, 5]), enforce_sorted=False))
        return pad_packed_sequence(y)[0], last


def check_same_as_one_process(grid, one, other, x, start, dims="wn-"):
    """Results and gradients of ``one`` in one process and of ``other`` on blocks; dropout draws the same numbers."""
    found = []
    for module, split in ((one, False), (dc.parallelize(other, grid), True)):
        torch.manual_seed(7)
        leaves = [t.clone().requires_grad_() for t in (x, start) if t is not None]
        given = [dc.scatter(leaf, grid, dims=d) for leaf, d in zip(leaves, (dims, "-n-"), strict=False)]
        results = [dc.gather(y) for y in module(*(given if split else leaves))]
        found.append(gradients(module, results, leaves))
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, **SMALL)


@RANKS
@pytest.mark.parametrize("method", ["sequential", "blelloch"])
def test_layers_in_both_directions_over_ranks(comm, method):
    options = {"num_layers": 2, "bidirectional": True, "dropout": 0.4, "batch_first": True}
    for grid, steps in itertools.product(grids(comm, "nw"), (2, 7)):
        modules = torch_and_scan_modules("gru", 3, 4, method=method, **options)
        check_same_as_one_process(grid, *modules, normal(3, steps, 3), normal(4, 3, 4), dims="nw-")


@RANKS
@pytest.mark.parametrize("kind", KINDS)
def test_torchs_own_modules_work_on_distributed_tensors(comm, kind):
    for grid in grids(comm, "nw"):
        one, _ = torch_and_scan_modules(kind, 3, 4, num_layers=2, bidirectional=True)
        check_same_as_one_process(grid, one, copy.deepcopy(one), normal(7, 3, 3), None)


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("fallback")
@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_sequences_of_distributed_data_equal_one_process(comm, bidirectional):
    one, _ = torch_and_scan_modules("gru", 3, 4, bidirectional=bidirectional)
    for grid in grids(comm, "nw"):
        check_same_as_one_process(grid, Packed(one), Packed(copy.deepcopy(one)), normal(7, 3, 3), None)


@RANKS
def test_large_batches_go_from_rank_to_rank_in_parts(comm, monkeypatch):
    monkeypatch.setattr("distconv.layers.recurrent.recurrence.MIN_PART_VALUES", 4)
    grid = grid_over(comm, w=comm.size)
    for samples in (1, 5, 7):
        check_same_as_one_process(
            grid, *torch_and_scan_modules("gru", 3, 4), normal(8, samples, 3), normal(1, samples, 4)
        )


@RANKS
def test_another_axis_and_split_features(comm):
    grid = grid_over(comm, c=comm.size)
    check_same_as_one_process(grid, *torch_and_scan_modules("gru", 6, 4), normal(7, 3, 6), normal(1, 3, 4), dims="-nc")
    check_same_as_one_process(grid, *torch_and_scan_modules("gru", 6, 4), normal(7, 3, 6), normal(1, 3, 4), dims="cn-")


@pytest.mark.ranks(2, 3)
def test_blocks_of_any_length(comm):
    grid = grid_over(comm, w=comm.size)
    one, other = torch_and_scan_modules("gru", 3, 4)
    x = normal(7, 2, 3)
    dist = dc.Distribution(grid, ("w", None, None), boundaries={"w": (0, *[6] * (comm.size - 1), 7)})
    found = dc.gather(dc.parallelize(other, grid)(dc.scatter(x, dist))[0])
    torch.testing.assert_close(found, one(x)[0], **SMALL)


@pytest.mark.ranks(2, 3)
def test_torchs_backward_does_not_go_over_ranks(comm):
    _, module = torch_and_scan_modules("gru", 3, 4, method="autograd")
    x = dc.scatter(normal(7, 2, 3), grid_over(comm, w=comm.size), dims="wn-")
    raises_everywhere(comm, dc.UnsupportedOperation, "cannot cross ranks among which", lambda: module(x))


@pytest.mark.ranks(2, 3)
def test_no_steps_and_features_of_another_number_raise_torchs_error(comm):
    one, _ = torch_and_scan_modules("gru", 3, 4)
    grid = grid_over(comm, w=comm.size)
    for shape, match in (
        ((0, 2, 3), "sequence length to be larger than 0"),
        ((5, 2, 4), "must be equal to input_size"),
    ):
        x = dc.scatter(normal(*shape), grid, dims="wn-")
        raises_everywhere(comm, RuntimeError, match, lambda x=x: one(x))


@pytest.mark.ranks(1)
def test_on_one_rank_torchs_own_module_has_a_second_derivative(comm):
    one, _ = torch_and_scan_modules("gru", 3, 4)
    x = normal(5, 2, 3).requires_grad_()
    found = []
    for given in (x, dc.scatter(x, grid_over(comm, w=1), dims="wn-")):
        (gradient,) = torch.autograd.grad(dc.gather(one(given)[0]).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    torch.testing.assert_close(found[1], found[0], **SMALL)
