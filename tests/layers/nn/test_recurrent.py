"""LSTM layers and recurrent cells, against one process; RNN and GRU layers: tests of distconv.layers.recurrent."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal
from tests.layers.compare import built, check_module_same_as_one_process, close

pytestmark = pytest.mark.ranks(at_most=4)


class JoinedStates(nn.Module):
    """Outputs and last states of a layer in one tensor, so that all have gradients; dropout from one seed."""

    def __init__(self, layer, batch_first=False, states=False):
        super().__init__()
        self.layer, self.batch_first, self.states = layer, batch_first, states

    def forward(self, x):
        torch.manual_seed(3)
        start = None
        if self.states:
            count = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
            samples = x.shape[0 if self.batch_first else 1]
            start = tuple(x.mean() + normal(count, samples, self.layer.hidden_size, seed=s) for s in (1, 2))
        y, (hidden, cell) = self.layer(x, start)
        last = hidden.sum((0, 2)) + cell.square().sum((0, 2))
        return y + (last[:, None, None] if self.batch_first else last[:, None])


LAYERS = {
    "time first": (dict(), False),
    "samples first": (dict(batch_first=True), False),
    "two layers in two directions": (dict(num_layers=2, bidirectional=True, batch_first=True), False),
    "given states": (dict(num_layers=2), True),
    "without biases": (dict(bias=False, batch_first=True), True),
    "projections": (dict(proj_size=2, batch_first=True), False),
    "dropout": (dict(num_layers=3, dropout=0.4), False),
    "dropout in two directions": (dict(num_layers=2, dropout=0.4, bidirectional=True, batch_first=True), True),
}


@pytest.mark.filterwarnings("error::distconv.ReplicationWarning")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("samples", [7, 1])
def test_an_lstm_equals_one_process(comm, name, samples):
    options, states = LAYERS[name]
    first = options.get("batch_first", False)
    module = built(lambda: JoinedStates(nn.LSTM(3, 4, **options), first, states))
    shape, axes = ((samples, 5, 3), ("n", "w", "c")) if first else ((5, samples, 3), ("w", "n", "c"))
    for grid in grids(comm, "nwc"):
        check_module_same_as_one_process(dc.Distribution(grid, axes), module, normal(*shape))


@pytest.mark.ranks(2, 3)
def test_samples_of_an_lstm_stay_where_they_are(comm):
    grid = grid_over(comm, n=comm.size)
    dist = dc.Distribution(grid, ("n", None, None), boundaries={"n": (0, 1, *(7,) * (comm.size - 1))})
    layer = built(lambda: nn.LSTM(3, 4, batch_first=True))
    y, (hidden, _) = layer(dc.scatter(normal(7, 5, 3), dist))
    assert y.dist == dist and hidden.dist.axes == (None, "n", None)
    check_module_same_as_one_process(dist, JoinedStates(layer, True), normal(7, 5, 3))


class Steps(nn.Module):
    """A cell over the steps of a sequence (T, N, I)."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state, results = None, []
        for step in x:
            state = self.cell(step, state)
            results.append(state[0] + state[1] if isinstance(state, tuple) else state)
        return torch.stack(results)


CELLS = {
    "LSTM": lambda: nn.LSTMCell(3, 4),
    "GRU": lambda: nn.GRUCell(3, 4),
    "RNN": lambda: nn.RNNCell(3, 4),
    "RNN of ReLU, without biases": lambda: nn.RNNCell(3, 4, bias=False, nonlinearity="relu"),
}


@pytest.mark.filterwarnings("error::distconv.ReplicationWarning")
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("samples", [7, 1])
def test_a_cell_equals_one_process(comm, name, samples):
    for grid in grids(comm, "nc"):
        dist = dc.Distribution(grid, (None, "n", "c"))
        found = check_module_same_as_one_process(dist, built(lambda: Steps(CELLS[name]())), normal(5, samples, 3))
        assert found.dist.split[1] == dist.split[1]


@pytest.mark.usefixtures("fallback")
@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
@pytest.mark.ranks(2)
def test_packed_sequences_are_computed_replicated_and_equal_one_process(comm):
    layer, lengths = built(lambda: nn.LSTM(3, 4, batch_first=True)), [5, 4, 4, 2]
    whole, split = normal(4, 5, 3).requires_grad_(), dc.scatter(normal(4, 5, 3), grid_over(comm, n=2), dims="n--")
    split.requires_grad_()
    results = []
    for x in (whole, split):
        y, _ = layer(pack_padded_sequence(x, lengths, batch_first=True))
        y, _ = pad_packed_sequence(y, batch_first=True)
        y.square().sum().backward()
        results.append(y.detach())
    close(dc.gather(results[1]), results[0], "y")
    close(dc.gather(split.grad), whole.grad, "dL/dx")
