"""Algorithm 1 against one product after another, and against the algorithm as it is printed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from distconv.kernels.scan import backpropagate, recorded, sweep_levels
from distconv.kernels.scan.algorithm import UpSweep
from distconv.kernels.scan.elements import Chain, Stack, make_level
from tests.kernels.scan.chains import CLOSE, assert_close, backpropagate_in_order, mixed, normal, stack

METHODS = [("linear", None), ("blelloch", None), ("truncated", 1), ("truncated", 2), ("truncated", 3)]


def as_printed(gradient, matrices):
    """Algorithm 1 line by line: what it leaves in a, and (phase, level, kind) of each product but those into a[n].

    ``gradient`` (N, 1), ``matrices`` (N, N); None is the identity of line 9, which overwrites a[n].
    """
    a, n, products = [gradient, *matrices], len(matrices), []
    levels = int(torch.tensor(n + 1.0, dtype=torch.float64).log2().ceil())

    def diamond(left, right, *where):
        if left is None or right is None:
            return right if left is None else left
        products.append((*where, "mv" if left.shape[1] == 1 else "mm"))
        return right @ left

    for d in range(levels - 1):
        for i in range(0, n - 2**d + 1, 2 ** (d + 1)):
            left, right = i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n)
            if right < n:
                a[right] = diamond(a[left], a[right], "up-sweep", d)
    a[n] = None
    for d in range(levels - 1, -1, -1):
        for i in range(0, n - 2**d + 1, 2 ** (d + 1)):
            left, right = i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n)
            kept, a[left] = a[left], a[right]
            a[right] = diamond(a[right], kept, "down-sweep", d)
    return a, products


LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 64, 130)


@pytest.mark.parametrize(("method", "depth"), METHODS)
def test_a_scan_of_any_length_equals_one_product_after_another(method, depth):
    jacobians, gradient, sources = stack(130), normal(2, 4, seed=1), normal(130, 2, 4, seed=2)
    width, others = mixed(130)
    start = normal(2, width, seed=1)
    expected = backpropagate_in_order(gradient, jacobians)
    affine = backpropagate_in_order(gradient, jacobians, sources)
    of_others = backpropagate_in_order(start, others)
    for n in LENGTHS:
        assert_close(backpropagate(gradient, jacobians[:n], method, depth=depth), expected[:n])
        assert_close(backpropagate(gradient, jacobians[:n], method, depth=depth, sources=sources[:n]), affine[:n])
        assert_close(backpropagate(start, others[:n], method, depth=depth), of_others[:n])


@pytest.mark.parametrize("n", [*range(1, 18), 21, 31, 32, 33])
def test_the_products_are_those_of_the_algorithm_as_printed(n):
    jacobians, gradient = stack(n, 1), normal(1, 4, seed=1)
    with recorded() as steps:
        found = backpropagate(gradient, jacobians, "blelloch")
    left, products = as_printed(gradient.t(), list(jacobians[:, 0]))
    assert left[0] is None
    assert_close([gradient, *found[:-1]], [column.t() for column in left[1:]])
    counted = Counter()
    for step in steps:
        if step.phase in ("up-sweep", "down-sweep"):
            counted[step.phase, step.level, step.kind] += step.count
    assert counted == Counter(products)
    assert [step.phase for step in steps if step.kind == "mm" and step.phase != "up-sweep"] == []
    assert Counter(step.phase for step in steps if step.phase not in ("up-sweep", "down-sweep")) == {"last": 1}


def test_levels_are_as_many_as_the_paper_draws():
    """VGG-11's 21 layers: L0 to L4 upwards, L5 (a[n] <- I) to L10 downwards; figure 1: 7 layers."""
    assert sweep_levels(21) == (len(range(0, 4)), len(range(5, 10)))
    assert sweep_levels(7) == (2, 3)
    for n in range(1, 70):
        _, products = as_printed(normal(1, 1), [normal(1, 1)] * n)
        up, down = ({d for phase, d, _ in products if phase == name} for name in ("up-sweep", "down-sweep"))
        # The last level upwards may have a[n] alone; the first one downwards only moves.
        assert len(up) in (sweep_levels(n)[0], sweep_levels(n)[0] - 1)
        assert max(down, default=-1) < sweep_levels(n)[1]


@pytest.mark.parametrize("depth", [None, 0, 1, 2])
@pytest.mark.parametrize("n", [1, 2, 3, 6, 7, 8])
def test_a_tree_gives_its_product_and_then_what_it_makes_of_any_vector(n, depth):
    gradient, sources = normal(2, 4, seed=1), normal(n, 2, 4, seed=2)
    for level in (Stack(stack(n), sources), make_level(list(stack(n)), list(sources))):
        assert isinstance(level, (Stack, Chain))
        tree = UpSweep.build(level, depth)
        expected = backpropagate_in_order(gradient, stack(n), sources)
        torch.testing.assert_close(tree.product()(gradient), expected[-1], **CLOSE)
        assert_close(tree.down_sweep(gradient), expected)
