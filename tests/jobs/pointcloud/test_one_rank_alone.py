"""One rank alone sees other clouds, or cannot make one: the same error on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distconv.jobs.pointcloud.datafile import write_clouds
from distconv.jobs.pointcloud.datasets import PointClouds
from tests.distconv.one_rank_alone import Case, Rank, check
from tests.jobs.pointcloud.cloud_files import write_ours

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(30)]


def opened(
    other: Callable[[Path], Any], usual: Callable[[Path], Any] = write_ours, name: str = "c.h5"
) -> Callable[[Rank], object]:
    """Open what each rank finds below its own folder."""

    def call(r: Rank) -> object:
        r.pick(usual, other)(Path(name))
        return PointClouds(Path(name), r.comm)

    return call


CASES: dict[str, Case] = {
    "nothing there": (opened(lambda path: None), r"c\.h5"),
    "a folder": (opened(Path.mkdir), r"c\.h5"),
    "text": (opened(lambda path: path.write_text("text")), r"c\.h5"),
    "no labels": (opened(lambda path: write_ours(path, label=np.zeros((0,), int))), r"c\.h5"),
    "a label": (opened(lambda path: write_ours(path, label=np.array([0, 1, 2, 0, 0]))), "as each rank sees it: ranks"),
    "labels of no class": (
        opened(lambda path: write_ours(path, label=np.array([0, 1, 2, 0, 7]))),
        "as each rank sees it: ranks",
    ),
    "points": (
        opened(lambda path: write_ours(path, points=np.zeros((5, 29, 3), np.float32))),
        "ranks disagree|on rank",
    ),
    "no parts": (opened(lambda path: write_ours(path, parts=False)), "ranks disagree|on rank"),
    "points of float16": (
        opened(lambda path: write_ours(path, points=np.zeros((5, 30, 3), np.float16))),
        "ranks disagree|on rank",
    ),
    "path to write": (
        lambda r: write_clouds(Path(r.pick("a.h5", "b.h5")), {}, r.comm, source="shapes"),
        "point clouds to write: ranks disagree",
    ),
    "source to write": (
        lambda r: write_clouds(Path("a.h5"), {}, r.comm, source=r.pick("shapes", "spheres")),
        "point clouds to write: ranks disagree",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_error_is_raised_on_all_ranks(rank: Rank, name: str) -> None:
    check(rank, *CASES[name])
