"""The public function: what it takes and gives, and ``auto``."""

from __future__ import annotations

import pytest
import torch

from distconv.errors import ScanError
from distconv.kernels.scan import SPEEDS, Identity, Speed, backpropagate, explain
from tests.kernels.scan.chains import assert_close, backpropagate_in_order, normal, stack

SLOW_CALLS = Speed(1.0, 1.0, 1e12, 1e12, 1e12, 1.0, 1e12)
SLOW_ARITHMETIC = Speed(1e-9, 1e-9, 1e3, 1e3, 1e12, 1e-9, 1e12)


@pytest.mark.parametrize("method", ["linear", "blelloch", "truncated", "auto"])
def test_one_tensor_in_one_tensor_out_and_a_list_for_a_list(method):
    jacobians, gradient = stack(5), normal(2, 4, seed=1)
    expected = backpropagate_in_order(gradient, jacobians)
    found = backpropagate(gradient, jacobians, method)
    assert isinstance(found, torch.Tensor) and found.shape == (5, 2, 4)
    assert_close(found, expected)
    listed = backpropagate(gradient, list(jacobians), method)
    assert isinstance(listed, list)
    assert_close(listed, expected)


@pytest.mark.parametrize("method", ["linear", "blelloch", "truncated"])
def test_what_is_passed_is_not_changed(method):
    given = [normal(2, 4, seed=1), stack(9), normal(9, 2, 4, seed=2)]
    copies = [each.clone() for each in given]
    backpropagate(given[0], given[1], method, sources=given[2])
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))


@pytest.mark.parametrize("method", ["linear", "blelloch", "truncated"])
def test_identities_are_free(method):
    jacobians, gradient = stack(3), normal(2, 4, seed=1)
    a, b, c = backpropagate_in_order(gradient, jacobians)
    i = Identity()
    found = backpropagate(gradient, [i, jacobians[0], i, i, jacobians[1], jacobians[2], i], method)
    assert_close(found, [gradient, a, a, a, b, c, c])


def test_one_matrix_for_all_samples_is_enough():
    jacobians, gradient = stack(9, samples=1), normal(3, 4, seed=1)
    for method in ("linear", "blelloch", "truncated"):
        assert_close(backpropagate(gradient, jacobians, method), backpropagate_in_order(gradient, jacobians))


def test_auto_scans_where_calls_are_dear_and_not_where_arithmetic_is():
    arguments = normal(1, 4), stack(64, 1)
    assert explain(*arguments, speed=SLOW_CALLS).method in ("blelloch", "truncated")
    assert explain(*arguments, speed=SLOW_ARITHMETIC).method == "linear"
    for speed in (SLOW_CALLS, SLOW_ARITHMETIC):
        assert_close(backpropagate(*arguments, speed=speed), backpropagate_in_order(*arguments))


def test_an_explanation_names_the_choice_and_the_time_of_each_method():
    text = str(explain(normal(1, 4), stack(64, 1)))
    assert text.startswith(explain(normal(1, 4), stack(64, 1), speed=SPEEDS["cpu"]).method)
    assert all(f"{name} " in text and " ms" in text for name in ("linear", "blelloch", "truncated"))


def test_a_truncated_scan_of_no_levels_is_linear_and_fewer_are_refused():
    jacobians, gradient = stack(5), normal(2, 4, seed=1)
    assert_close(backpropagate(gradient, jacobians, "truncated", depth=0), backpropagate_in_order(gradient, jacobians))
    for method, depth in (("truncated", -1), ("tree", None)):
        with pytest.raises(ScanError, match=rf"method '{method}', depth {depth}: pass one of .*, depth >= 0"):
            backpropagate(gradient, jacobians, method, depth=depth)
