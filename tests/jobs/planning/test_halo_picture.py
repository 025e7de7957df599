"""The largest halo of a plan, against convolutions whose halo is counted by hand."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch import nn

from distconv.jobs.planning.halo_picture import Halo, HaloSide, draw_halo, largest_halo
from distconv.perfmodel import Machine, trace
from distconv.perfmodel.cost.evaluation import evaluate
from distconv.plan import Plan


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


def rectangle(patch):
    """Left, top, width, height."""
    return pytest.approx((*patch.get_xy(), patch.get_width(), patch.get_height()))


def test_the_diagram_has_each_block_the_halo_around_one_and_its_rows():
    # 21 rows and 12 columns over 2 x 3: blocks of 11 and 10 rows, and of 4 columns. A kernel of 5 needs 2 on each side.
    shown = Halo("conv", (HaloSide("h", 21, 2, 0, 0, 2), HaloSide("w", 12, 3, 1, 2, 1)), 12345)
    axis = Figure().add_subplot()
    draw_halo(axis, shown)
    *blocks, halo, block = axis.patches
    expected = [(4 * j, down, 4, rows) for down, rows in ((0, 11), (11, 10)) for j in range(3)]
    assert len(blocks) == 6 and all(each == rectangle(patch) for each, patch in zip(expected, blocks, strict=True))
    assert rectangle(block) == (4, 0, 4, 11)
    assert rectangle(halo) == (4 - 2, 0, 2 + 4 + 1, 11 + 2)
    assert [to_hex(patch.get_facecolor()) for patch in (blocks[0], halo, block)] == ["#f2f2f2", "#fdae6b", "#9ecae1"]
    assert halo.zorder < block.zorder and all(each.zorder < halo.zorder for each in blocks)
    assert (axis.get_xlim(), axis.get_ylim()) == ((0, 12), (21, 0))
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("w", "h")
    (text,) = axis.texts
    assert text.get_text() == "11 x 4\nh: 0 before, 2 after\nw: 2 before, 1 after"
    assert text.get_position() == (6, 5.5)
    assert axis.get_title() == "largest halo: conv, 12,345 elements a sample\n(not to scale)"


def test_a_halo_is_drawn_as_wide_as_can_be_seen_and_an_axis_that_is_not_split_is_not_named():
    shown = Halo("conv", (HaloSide("h", 2000, 2, 1, 1, 0), HaloSide("w", 12, 1)), 12)
    axis = Figure().add_subplot()
    draw_halo(axis, shown)
    halo, block = axis.patches[-2:]
    assert rectangle(block) == (0, 1000, 12, 1000)
    assert rectangle(halo) == (0, 1000 - 80, 12, 1080)
    assert axis.texts[0].get_text() == "1000 x 12\nh: 1 before, 0 after"
