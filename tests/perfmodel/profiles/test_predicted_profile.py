"""Layer profiles of traced networks by a machine's roofline, against the formulas by hand."""

from __future__ import annotations

import pytest
from torch import nn

from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.machine.links import RankGroup
from distconv.perfmodel.profiles.predicted_profile import predicted_profile
from distconv.plan import Plan
from tests.perfmodel.networks import FLOPS, KERNEL, plain


def network():
    layers = [nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(8, 2, 5, padding=2, bias=False)]
    return trace(nn.Sequential(*layers), (6, 4, 12, 10))


def convolutions(samples, height):
    """Seconds of one pass of each of the two: twice the multiply-adds, and a kernel."""
    positions = samples * height * 10
    return [KERNEL + 2 * positions * taps / FLOPS for taps in (8 * 4 * 9, 2 * 8 * 25)]


def test_each_layer_takes_its_flops_and_its_kernels():
    first, relu, last = predicted_profile(network(), plain()).layers
    one, other = convolutions(6, 12)
    # The first layer has no BPx; ReLU moves memory, which costs nothing here.
    assert (first.forward_s, first.backward_s) == pytest.approx((one, one), rel=1e-12)
    assert (relu.forward_s, relu.backward_s) == pytest.approx((KERNEL, KERNEL), rel=1e-9)
    assert (last.forward_s, last.backward_s) == pytest.approx((other, 2 * other), rel=1e-12)
    assert [layer.activation_bytes for layer in (first, relu, last)] == [4 * 6 * f * 120 for f in (8, 8, 2)]
    assert [layer.parameter_bytes for layer in (first, relu, last)] == [4 * 8 * 4 * 9, 0, 4 * 2 * 8 * 25]


def test_rows_on_two_ranks_take_half_halos_and_a_layer_on_another_grid_its_redistribution():
    here = plain()

    def sr(elements):
        """A message (V-A)."""
        return 1e-4 + 4 * elements / 1e6

    first, _, last = predicted_profile(network(), here, Plan({"0": {"h": 2}, "2": {"n": 2}}), 2).layers
    one, other = convolutions(6, 6)[0], convolutions(3, 12)[1]
    halo = sr(1 * 6 * 4 * 10)
    assert first.forward_s == pytest.approx(one + halo, rel=1e-12)
    # Half of a block of 3 x 8 x 12 x 10 comes from the other rank; there and back: a message and two kernels each.
    shuffle = 1e-4 + 4 * (3 * 8 * 6 * 10) / 1e6 + 2 * KERNEL
    reduced = here.allreduce(RankGroup(2, 2), 4 * 2 * 8 * 25)
    assert last.forward_s == pytest.approx(other + shuffle, rel=1e-12)
    assert last.backward_s == pytest.approx(2 * other + shuffle + reduced, rel=1e-12)


def test_from_a_replicated_layer_nothing_is_moved_and_its_gradient_is_on_the_way_back():
    here = plain()
    _, _, last = predicted_profile(network(), here, Plan({"0": {"r": 2}, "2": {"n": 2}}), 2).layers
    other = convolutions(3, 12)[1]
    gathered = 1e-4 + 4 * (3 * 8 * 12 * 10) / 1e6 + 2 * KERNEL
    reduced = here.allreduce(RankGroup(2, 2), 4 * 2 * 8 * 25)
    assert last.forward_s == pytest.approx(other, rel=1e-12)
    assert last.backward_s == pytest.approx(2 * other + gathered + reduced, rel=1e-12)
