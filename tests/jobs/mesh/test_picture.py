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


def test_cells_that_are_found_missed_and_called_in_vain_have_colours_of_their_own() -> None:
    from distconv.jobs.mesh.picture import Example, _outcome

    label, probability = np.array([[1, 1, 0, 0]]), np.array([[0.5, 0.4, 0.5, 0.4]])
    green, red, orange, white = _outcome(Example("", label, label, probability), 0.5)[0].tolist()
    assert green[1] > max(green[0], green[2])
    assert red[0] > 0.5 > max(red[1], red[2])
    assert orange[0] > orange[1] > 0.5 > orange[2]
    assert white == [1, 1, 1]
