"""FLOP of a scan against counting by hand."""

from __future__ import annotations

from distconv.kernels.scan import Identity, Step, backpropagate, critical_path, recorded
from tests.kernels.scan.chains import csr, normal, stack


def recorded_steps(jacobians, method, depth=None, samples=2, width=4):
    with recorded() as steps:
        backpropagate(normal(samples, width), jacobians, method, depth=depth)
    return steps


def test_a_stacks_products_are_counted_together():
    """Seven of 4 x 4 for two samples: as in figure 1, but for the products into a[n]; and the last one."""
    mv, mm = 2 * 2 * 4 * 4, 2 * 2 * 4**3
    assert recorded_steps(stack(7), "blelloch") == [
        Step("up-sweep", 0, "mv", mv),
        Step("up-sweep", 0, "mm", mm, 2),
        Step("up-sweep", 1, "mv", mv),
        Step("down-sweep", 1, "mv", mv),
        Step("down-sweep", 0, "mv", mv, 3),
        Step("last", 0, "mv", mv),
    ]


def test_sparse_products_cost_what_meets_and_identities_nothing():
    eye = normal(4, 4).new_ones(4).diag()
    double = csr(eye + eye.roll(1, 0))
    steps = recorded_steps([csr(eye), double, csr(eye), Identity(), csr(eye)], "blelloch")
    assert steps == [
        Step("up-sweep", 0, "mv", 2 * 2 * 4),
        Step("up-sweep", 0, "mm", 2 * 8),
        Step("up-sweep", 1, "mv", 2 * 2 * 8),
        Step("down-sweep", 0, "mv", 2 * 2 * 8),
        Step("last", 0, "mv", 2 * 2 * 4),
    ]


def test_nothing_is_recorded_outside():
    steps = recorded_steps(stack(3), "linear")
    before = len(steps)
    backpropagate(normal(2, 4), stack(3), "linear")
    assert len(steps) == before == 2


def test_the_critical_path_has_the_largest_step_of_each_level_and_all_linear_ones():
    steps = [
        Step("up-sweep", 0, "mm", 5),
        Step("up-sweep", 0, "mm", 9, 3),
        Step("up-sweep", 1, "mv", 2),
        Step("linear", 0, "mv", 3, 4),
        Step("linear", 0, "mv", 1),
        Step("down-sweep", 0, "mv", 7, 2),
    ]
    path = critical_path(steps)
    assert [(step.flops, step.count) for step in path] == [(9, 1), (2, 1), (3, 4), (1, 1), (7, 1)]


def test_blocks_within_each_other_end_in_order():
    with recorded() as outer:
        with recorded() as inner:
            pass
        backpropagate(normal(2, 4), stack(3), "linear")
    assert inner == [] and len(outer) > 0
