"""The backward pass block by block: gradients do not depend on the blocks, and memory is bounded."""

from __future__ import annotations

import pytest
import torch

from distconv.layers.recurrent import backward
from distconv.layers.recurrent.backward import ForwardSteps, compose_steps, compute_gradients
from distconv.layers.recurrent.cells import CELLS, CellWeights
from distconv.layers.recurrent.methods import Method
from tests.distconv.layouts import normal
from tests.layers.recurrent.modules import SMALL


def steps_of(name, count=11, batch=2, inputs=3, hidden=4):
    cell = CELLS[name]
    shapes = [(cell.gates * hidden, inputs), (cell.gates * hidden, hidden), *[(cell.gates * hidden,)] * 2]
    weights = [normal(*shape, seed=i) / 2 for i, shape in enumerate(shapes)]
    x, start = normal(count, batch, inputs, seed=8), normal(batch, hidden, seed=9)
    return ForwardSteps(cell, CellWeights(*weights), x, start, cell.states(x, start, weights))


def set_block_bytes(monkeypatch, sweep, scan):
    monkeypatch.setattr(backward, "SWEEP_BYTES", sweep)
    monkeypatch.setattr(backward, "SCAN_BYTES", {"cpu": scan, "cuda": scan})


@pytest.mark.parametrize("method", [Method.SEQUENTIAL, Method.BLELLOCH, Method.TRUNCATED])
@pytest.mark.parametrize("name", CELLS)
def test_blocks_change_nothing(monkeypatch, name, method):
    steps = steps_of(name)
    sources, carry = normal(11, 2, 4), normal(2, 4, seed=1)
    whole = compute_gradients(steps, sources, carry, method)
    for size in (1, 3000, 1 << 14):
        set_block_bytes(monkeypatch, size, size)
        found = compute_gradients(steps, sources, carry, method)
        torch.testing.assert_close(found.input_gradient, whole.input_gradient, **SMALL)
        torch.testing.assert_close(found.carry, whole.carry, **SMALL)
        for one, other in zip(found.weight_gradients, whole.weight_gradients, strict=True):
            torch.testing.assert_close(one, other, **SMALL)


def test_blocks_cover_the_steps_from_the_last_to_the_first(monkeypatch):
    steps = steps_of("gru")
    assert list(steps.blocks(scans=True)) == [slice(0, 11)]
    set_block_bytes(monkeypatch, 4 * 13 * 2 * 8 * 4, 1)
    assert list(steps.blocks(scans=False)) == [slice(7, 11), slice(3, 7), slice(0, 3)]
    assert len(list(steps.blocks(scans=True))) == 11


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("size", [1, 1 << 13, 1 << 26])
def test_the_product_of_all_steps_is_one_map(monkeypatch, name, size):
    set_block_bytes(monkeypatch, 1 << 20, size)
    steps, sources, carry = steps_of(name), normal(11, 2, 4), normal(2, 4, seed=1)
    matrix, shift = compose_steps(steps, sources)
    expected = compute_gradients(steps, sources, carry, Method.SEQUENTIAL).carry
    torch.testing.assert_close((matrix @ carry[..., None])[..., 0] + shift, expected, **SMALL)


def test_no_steps_are_the_identity():
    matrix, shift = compose_steps(steps_of("gru", count=1), normal(1, 2, 4))
    empty = ForwardSteps(CELLS["gru"], steps_of("gru").weights, normal(0, 2, 3), normal(2, 4), normal(0, 2, 4))
    matrix, shift = compose_steps(empty, normal(0, 2, 4))
    assert torch.equal(matrix, torch.eye(4, dtype=torch.float64).repeat(2, 1, 1))
    assert not shift.any()


def test_gradients_of_inputs_that_are_not_needed_are_left_out():
    assert (
        compute_gradients(
            steps_of("gru"), normal(11, 2, 4), normal(2, 4), Method.SEQUENTIAL, needs_input_gradient=False
        ).input_gradient
        is None
    )
