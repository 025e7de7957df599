"""The picture at the end of training."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np


def test_pictures_can_be_drawn_without_warnings(tmp_path: Path) -> None:
    from distconv.jobs.mesh.picture import Example, draw
    from distconv.jobs.mesh.scores import Verdict

    maps = np.random.default_rng(0).random((3, 8, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(
            tmp_path / "x.png",
            [Example("shear", *maps)],
            channel="skew",
            threshold=0.5,
            losses=[(1, 1.0), (2, 0.5)],
            verdicts=[
                Verdict("never", ">= 1", 0, 0, {}),
                Verdict("net", ">= 0.5", 0.5, 0.5, {}, [(0.1, 1.0), (1.0, 0.2)]),
            ],
            title="title",
        )
        draw(tmp_path / "y.png", [], channel="skew", threshold=0.5, losses=[], verdicts=[], title="nothing")
    assert (tmp_path / "x.png").stat().st_size > 1000
