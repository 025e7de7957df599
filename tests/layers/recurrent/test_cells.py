"""Derivatives of the cells against those of autograd for each step."""

from __future__ import annotations

import pytest
import torch

from distconv.layers.recurrent.cells import CELLS, CellWeights
from tests.distconv.layouts import normal

STEPS, BATCH, INPUTS, HIDDEN = 4, 2, 3, 5


def weights_of(cell, bias):
    shapes = [(cell.gates * HIDDEN, INPUTS), (cell.gates * HIDDEN, HIDDEN), *[(cell.gates * HIDDEN,)] * (2 * bias)]
    return [normal(*shape, seed=i) / 2 for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_jacobians_are_those_of_the_steps(name, bias):
    cell = CELLS[name]
    weights, x = weights_of(cell, bias), normal(STEPS, BATCH, INPUTS, seed=5)
    start = normal(BATCH, HIDDEN, seed=6)
    states = cell.states(x, start, weights)
    before = torch.cat([start[None], states[:-1]])
    found = cell.derivatives(x, before, states, CellWeights(*weights)).jacobians(weights[1])
    for t in range(STEPS):
        for b in range(BATCH):
            step = lambda h, t=t, b=b: cell.states(x[t : t + 1, b : b + 1], h[None], weights)[0, 0]  # noqa: E731
            expected = torch.autograd.functional.jacobian(step, before[t, b]).T
            torch.testing.assert_close(found[t, b], expected, rtol=1e-12, atol=1e-12)


def test_factors_of_the_last_step_first():
    cell = CELLS["gru"]
    weights, x, start = weights_of(cell, True), normal(3, 1, INPUTS), normal(1, HIDDEN)
    states = cell.states(x, start, weights)
    factors = cell.derivatives(x, torch.cat([start[None], states[:-1]]), states, CellWeights(*weights))
    assert torch.equal(factors.reversed().jacobians(weights[1]), factors.jacobians(weights[1]).flip(0))
    assert torch.equal(factors.reversed().input, factors.input.flip(0))
