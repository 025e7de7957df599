"""The largest halo of a plan, against convolutions whose halo is counted by hand."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure
from torch import nn

from distconv.jobs.planning.halo_picture import Halo, HaloSide, draw_halo, largest_halo
from distconv.perfmodel import Machine, trace
from distconv.perfmodel.cost.evaluation import evaluate
from distconv.plan import Plan
from tests.jobs.approved import assert_approved
from tests.jobs.approved.figures import describe


def halo_of(model: nn.Module, shape: tuple[int, ...], parts: dict[str, int]):
    graph, ranks = trace(nn.Sequential(model), shape), 4
    prediction = evaluate(graph, Plan({"*": parts}, ranks), Machine.load("localhost"), ranks)
    return largest_halo(graph, prediction, ranks, 4)


def test_the_layer_that_needs_most_is_shown_with_the_rows_of_its_neighbours():
    # Of 20 rows a rank has 5. A kernel of 7 needs 3 before and 3 after, one of 3 a row of each side.
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 1, 7, padding=3))
    found = halo_of(model, (2, 2, 20, 12), {"h": 4})
    assert (found.layer, found.elements) == ("0.1", 3 * 12 * (3 + 3))
    assert found.sides == (HaloSide("h", 20, 4, 1, 3, 3), HaloSide("w", 12, 1))
    assert list(found.sides[0].block(1)) == [5, 6, 7, 8, 9]


def test_corners_belong_to_it_and_of_three_dimensions_the_split_ones_are_drawn():
    # 6 x 8 x 10 in 2 x 2 blocks of 3 rows and 5 columns: 3 * 8 * 5 are owned, 4 * 8 * 6 needed, of two channels.
    found = halo_of(nn.Conv3d(2, 1, 3, padding=1), (1, 2, 6, 8, 10), {"d": 2, "w": 2})
    assert found.elements == 2 * (4 * 8 * 6 - 3 * 8 * 5)
    assert [(side.axis, side.parts, side.before + side.after) for side in found.sides] == [("d", 2, 1), ("w", 2, 1)]


@pytest.mark.parametrize("parts", [{"n": 4}, {"c": 4}])
def test_without_a_split_in_space_there_is_none(parts):
    assert halo_of(nn.Conv2d(4, 4, 3, padding=1), (4, 4, 20, 12), parts) is None


def test_a_kernel_of_one_needs_no_neighbour():
    assert halo_of(nn.Conv2d(4, 4, 1), (1, 4, 20, 12), {"h": 4}) is None


def test_diagrams_are_as_approved():
    """Blocks of 11 and 10 rows and of 4 columns; a halo that is drawn as wide as can be seen; an axis without parts."""
    lines = []
    for sides in ((HaloSide("h", 21, 2, 0, 0, 2), HaloSide("w", 12, 3, 1, 2, 1)),
                  (HaloSide("h", 2000, 2, 1, 1, 0), HaloSide("w", 12, 1))):  # fmt: skip
        figure = Figure()
        draw_halo(figure.add_subplot(), Halo("conv", sides, 12345))
        lines += describe(figure)
    assert_approved("figures/halo", "\n".join(lines))
