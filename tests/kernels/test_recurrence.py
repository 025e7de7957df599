"""The sweep of a recurrence against products of its Jacobians."""

from __future__ import annotations

import pytest
import torch

from distconv.kernels import recurrence
from tests.distconv.layouts import normal


def by_jacobians(carry, sources, factors, direct, weight):
    found = torch.empty_like(sources)
    gates = weight.unflatten(0, (factors.shape[2], -1))
    for t in reversed(range(len(sources))):
        found[t] = sources[t] + carry
        jacobian = torch.einsum("gkj,bgk->bjk", gates, factors[t])
        if direct is not None:
            jacobian = jacobian + torch.diag_embed(direct[t])
        carry = torch.einsum("bjk,bk->bj", jacobian, found[t])
    return found, carry


@pytest.mark.parametrize("hidden", [1, 4, 7])
@pytest.mark.parametrize(("gates", "past"), [(1, False), (3, True)])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_sweep_is_the_product_of_jacobians(monkeypatch, hidden, gates, past, compiled):
    monkeypatch.setattr(recurrence, "MAX_COMPILED_SIZE", 96 if compiled else 0)
    assert recurrence.is_compiled(torch.device("cpu"), torch.float64, hidden) == compiled
    direct = normal(9, 2, hidden, seed=4) if past else None
    given = (
        normal(2, hidden),
        normal(9, 2, hidden, seed=1),
        normal(9, 2, gates, hidden, seed=2),
        direct,
        normal(gates * hidden, hidden, seed=3) / hidden,
    )
    before = [None if tensor is None else tensor.clone() for tensor in given]
    for found, expected in zip(recurrence.backpropagate_steps(*given), by_jacobians(*given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for tensor, kept in zip(given, before, strict=True):
        assert tensor is kept is None or torch.equal(tensor, kept)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_sweep_over_few_steps_or_no_samples(steps):
    for batch in (0, 2):
        carry = normal(batch, 3)
        found, v = recurrence.backpropagate_steps(
            carry, normal(steps, batch, 3), normal(steps, batch, 1, 3), None, normal(3, 3)
        )
        assert found.shape == (steps, batch, 3)
        assert v.shape == (batch, 3)
        if not steps:
            assert torch.equal(v, carry)


def test_the_compiled_sweep_is_for_narrow_states_of_two_dtypes_on_the_cpu():
    cpu = torch.device("cpu")
    assert recurrence.is_compiled(cpu, torch.float32, 96)
    assert not recurrence.is_compiled(cpu, torch.float32, 97)
    assert not recurrence.is_compiled(cpu, torch.bfloat16, 8)
    assert not recurrence.is_compiled(torch.device("cuda"), torch.float32, 8)
