"""``dc.show``: every index of a tensor is in the cell of the ranks that own it, as text and as SVG."""

from __future__ import annotations

import re
import types
import xml.etree.ElementTree as ET

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv import pictures
from distconv.arrangement import Arrangement

SVG = "{http://www.w3.org/2000/svg}"


def owners_shown(picture: pictures.Picture) -> dict[tuple[tuple[str, int], ...], tuple[int, ...]]:
    """Return the ranks shown for each combination of indices of the split dimensions, read from the labels."""
    found = {}

    def indices(label: str) -> list[tuple[str, int]] | list[None]:
        if not label:
            return [None]
        axis, ranges = label.split()
        return [(axis, i) for each in ranges.split(",") for i in range(*map(int, each.split(":")))]

    for panel in picture.panels:
        outer = [indices(label) for label in panel.title.split(", ") if label]
        for row, cells in zip(panel.rows, panel.ranks, strict=True):
            for column, ranks in zip(panel.columns, cells, strict=True):
                for place in [[]] if not outer else [[i] for i in outer[0]]:
                    for first in indices(row):
                        for second in indices(column):
                            key = tuple(sorted(i for i in (*place, first, second) if i is not None))
                            assert key not in found
                            found[key] = ranks
    return found


@pytest.mark.parametrize(
    ("grid", "axes", "shape", "options"),
    [
        ({"h": 3}, "nchw", (2, 3, 7, 5), {}),
        ({"n": 2, "h": 2}, "nchw", (3, 1, 5, 8), {}),
        ({"n": 2, "c": 2, "w": 3}, "nchw", (5, 2, 1, 7), {}),
        ({"h": 2, "r": 2}, (None, "h"), (2, 9), {}),
        ({"h": 2}, (None, "h"), (2, 5), {"cyclic": {"h": 1}}),
        ({"h": 2, "w": 2}, ("h", "w"), (5, 4), {"boundaries": {"h": (0, 1, 5)}}),
        ({"h": 4}, ("h", None), (3, 2), {}),
        ({"h": 1}, ("h", None), (3, 2), {}),
    ],
)
def test_each_index_is_shown_at_the_ranks_that_own_it(grid, axes, shape, options, capsys) -> None:
    axes = tuple(axes)
    dist = dc.Distribution(Arrangement(**grid), axes, **options)
    shown = owners_shown(dc.show(dist, shape))
    split = [(dim, axis) for dim, axis in enumerate(axes) if axis and grid.get(axis, 1) > 1]
    expected = {
        tuple(sorted((axis, index[dim]) for dim, axis in split)): tuple(dist.owners(index, shape))
        for index in (tuple(i) for i in torch.cartesian_prod(*map(torch.arange, shape)).tolist())
    }
    assert shown == expected


def test_a_distribution_is_printed_as_a_table(capsys) -> None:
    picture = dc.show(dc.Distribution(Arrangement(n=2, c=2, h=2), "nchw"), (3, 5, 4, 1))
    assert capsys.readouterr().out == f"{picture}\n"
    assert str(picture).splitlines() == [
        "tensor (3, 5, 4, 1) over n=2,c=2,h=2",
        "  n 0:2",
        "           h 0:2   h 2:4",
        "  c 0:3   rank 0  rank 2",
        "  c 3:5   rank 1  rank 3",
        "  n 2:3",
        "           h 0:2   h 2:4",
        "  c 0:3   rank 4  rank 6",
        "  c 3:5   rank 5  rank 7",
    ]


def test_a_grid_and_a_plan_are_shown_with_their_ranks(capsys) -> None:
    grid = Arrangement(n=2, h=2, w=3)
    (panel,) = dc.show(grid).panels
    for row, label in zip(panel.ranks, panel.rows, strict=True):
        for (rank,), column in zip(row, panel.columns, strict=True):
            coords = {axis: int(i) for axis, i in (part.split("=") for part in f"{label} {column}".split())}
            assert rank == grid.rank_of(coords)
    picture = dc.show(dc.Plan({"*": {"h": 2}, "fc": {"n": 4}}, ranks=4))
    assert [panel.title for panel in picture.panels] == ["layers '*': h=2", "layers 'fc': n=4"]
    assert sorted(rank for row in picture.panels[0].ranks for ranks in row for rank in ranks) == [0, 1, 2, 3]
    assert str(dc.show(Arrangement())).splitlines() == ["process grid n=1", "        n=0", "     rank 0"]


def test_a_figure_has_a_cell_and_a_name_for_each_combination(capsys) -> None:
    picture = dc.show(dc.Distribution(Arrangement(n=2, h=3), "nchw"), (3, 1, 7, 8))
    root = ET.fromstring(picture.svg())
    cells = [r for r in root.iter(f"{SVG}rect") if r.get("stroke")]
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert [t for t in texts if t.startswith("rank ")] == [f"rank {i}" for i in range(6)]
    assert root.find(f"{SVG}title").text == str(picture)
    heights = sorted({float(r.get("height")) for r in cells})
    assert heights[1] / heights[0] == pytest.approx(2.0, rel=1e-4)  # two samples and one
    widths = sorted({float(r.get("width")) for r in cells})
    assert widths[1] / widths[0] == pytest.approx(1.5, rel=1e-4)  # three rows and two
    assert {r.get("fill") for r in cells} == set(pictures.color_of(i) for i in range(6))
    right = max(float(r.get("x")) + float(r.get("width")) for r in cells)
    bottom = max(float(r.get("y")) + float(r.get("height")) for r in cells)
    assert right <= float(root.get("width")) and bottom <= float(root.get("viewBox").split()[3])


def test_a_notebook_gets_the_figure_and_no_text(monkeypatch, capsys) -> None:
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(pictures.sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    picture = dc.show(Arrangement(h=2))
    assert capsys.readouterr().out == ""
    assert picture._repr_svg_() == picture.svg()
    assert repr(picture) == "<Picture of process grid h=2>"


@pytest.mark.parametrize(
    ("what", "shape", "message"),
    [
        (dc.Distribution(Arrangement(h=2), ("h",)), None, "show: Distribution without shape cannot be shown"),
        (Arrangement(h=2), (4,), "show: Arrangement with shape cannot be shown"),
        (torch.zeros(2), None, "show: Tensor without shape cannot be shown. Pass a DistTensor"),
        (dc.Distribution(Arrangement(h=2), ("h",)), (4, 4), r"has 1 dimensions but shape=\(4, 4\) has 2"),
        (Arrangement(h=257), None, "show: 257 ranks are too many for a picture. Show a grid of at most 256"),
    ],
)
def test_what_cannot_be_shown_is_an_error(what, shape, message) -> None:
    with pytest.raises(dc.DistributionError, match=message):
        dc.show(what, shape)


@pytest.mark.ranks(2, 4)
def test_rank_0_prints_the_picture_of_a_tensor(comm: MPI.Intracomm, capsys) -> None:
    grid = dc.ProcessGrid(comm, h=comm.size)
    x = dc.scatter(torch.zeros(1, 2, 5, 3), grid)
    picture = dc.show(x)
    expected = dc.show(dc.Distribution(Arrangement(h=comm.size), "nchw"), (1, 2, 5, 3))
    assert str(picture) == str(expected)
    printed = re.split("\n(?=tensor)", capsys.readouterr().out)
    assert len(printed) == 2 if comm.rank == 0 else printed == [""]
