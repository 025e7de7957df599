"""A recurrence over ranks: its adjoint, its messages and its memory."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from distconv.communication.transport import count_traffic
from distconv.layers.recurrent import recurrence
from distconv.layers.recurrent.cells import CELLS
from distconv.layers.recurrent.methods import Method
from distconv.layers.recurrent.recurrence import Recurrence
from distconv.layers.recurrent.time_ranks import TimeRanks
from tests.distconv.layouts import grid_over, normal

STEPS, BATCH, HIDDEN = 7, 2, 4


def block_of(comm):
    """This rank's steps of 7."""
    dist = dc.Distribution(grid_over(comm, w=comm.size), ("w",))
    return slice(*dist.box(None, (STEPS,))[0])


@pytest.mark.parametrize("method", [Method.SEQUENTIAL, Method.BLELLOCH])
@pytest.mark.parametrize("name", CELLS)
def test_the_backward_pass_over_ranks_is_the_adjoint_of_the_derivative(comm, name, method):
    cell = CELLS[name]
    weights = [normal(cell.gates * HIDDEN, n, seed=n) / 2 for n in (3, HIDDEN)]
    x, start = normal(STEPS, BATCH, 3), normal(BATCH, HIDDEN, seed=1)
    dx, dstart, gradient = normal(STEPS, BATCH, 3, seed=2), normal(BATCH, HIDDEN, seed=3), normal(STEPS, BATCH, HIDDEN)
    # <dy, gradient> by central differences in one process ...
    small = 1e-5
    above, below = (cell.states(x + s * dx, start + s * dstart, weights) for s in (small, -small))
    expected = ((above - below) * gradient).sum() / (2 * small)
    # ... and <(dx, dstart), adjoint of gradient> over ranks, each value counted once.
    block, ranks = block_of(comm), TimeRanks(grid_over(comm, w=comm.size), "w", -(-STEPS // comm.size), False)
    own, first = x[block].clone().requires_grad_(), start.clone().requires_grad_()
    y = Recurrence(cell, method, ranks)(own, first, weights)
    torch.testing.assert_close(y.detach(), cell.states(x, start, weights)[block], rtol=1e-12, atol=1e-12)
    y.backward(gradient[block])
    found = comm.allreduce(float((own.grad * dx[block]).sum() + (first.grad * dstart).sum()))
    assert found == pytest.approx(float(expected), rel=1e-8)


@pytest.mark.ranks(3, 4)
def test_states_alone_cross_ranks(comm):
    """Going back step after step sends as little as going forward: a state (B, H) for each boundary."""
    grid = grid_over(comm, w=comm.size)
    weights = [normal(3 * HIDDEN, n).requires_grad_() for n in (3, HIDDEN)]
    ranks = TimeRanks(grid, "w", -(-STEPS // comm.size), False)
    with count_traffic() as traffic:
        y = Recurrence(CELLS["gru"], Method.SEQUENTIAL, ranks)(
            normal(STEPS, BATCH, 3)[block_of(comm)], normal(BATCH, HIDDEN), weights
        )
        y.sum().backward()
    neighbours = (comm.rank > 0) + (comm.rank + 1 < comm.size)
    assert traffic.sent["state of a recurrence"] == neighbours * BATCH * HIDDEN * 8


@pytest.mark.ranks(2, 4)
def test_a_rank_keeps_inputs_and_states_of_its_own_steps_alone(comm):
    grid, steps = grid_over(comm, w=comm.size), 400
    weights = [normal(3 * HIDDEN, n).requires_grad_() for n in (3, HIDDEN)]
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    ranks = TimeRanks(grid, "w", steps // comm.size, False)
    x = normal(steps // comm.size, BATCH, 3).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        Recurrence(CELLS["gru"], Method.SEQUENTIAL, ranks)(x, normal(BATCH, HIDDEN), weights)
    of_steps = steps * BATCH * (3 + HIDDEN) // comm.size
    assert sum(tensor.numel() for tensor in kept) == of_steps + BATCH * HIDDEN + sum(w.numel() for w in weights)


@pytest.mark.parametrize("chosen", [Method.AUTOGRAD, Method.SEQUENTIAL])
def test_a_rank_of_a_scan_uses_the_chosen_method_unless_it_is_torchs(comm, monkeypatch, chosen):
    """On a GPU that is cuDNN, which accepts no gradient from the later rank."""
    methods, gradients = [], recurrence.compute_gradients
    monkeypatch.setattr(recurrence, "fastest_method", lambda problem: chosen)
    monkeypatch.setattr(
        recurrence, "compute_gradients", lambda *given, **more: methods.append(given[3]) or gradients(*given, **more)
    )
    grid, cell = grid_over(comm, w=comm.size), CELLS["gru"]
    weights = [normal(cell.gates * HIDDEN, n, seed=n).requires_grad_() for n in (3, HIDDEN)]
    own = normal(STEPS, BATCH, 3)[block_of(comm)]
    ranks = TimeRanks(grid, "w", -(-STEPS // comm.size), False)
    y = Recurrence(cell, Method.BLELLOCH, ranks)(own, normal(BATCH, HIDDEN, seed=1), weights)
    y.sum().backward()
    assert methods == [Method.BLELLOCH if chosen is Method.AUTOGRAD else chosen]
