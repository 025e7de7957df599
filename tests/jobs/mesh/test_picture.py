"""Pictures of mesh samples: the first one of a data set, and the result of training."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def test_pictures_can_be_drawn_without_warnings(tmp_path: Path) -> None:
    from distconv.jobs.mesh.picture import MeshExample, draw
    from distconv.jobs.mesh.scores import PredictorScore

    maps = np.random.default_rng(0).random((3, 8, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(
            tmp_path / "x.png",
            [MeshExample("shear", *maps)],
            channel="skew",
            threshold=0.5,
            losses=[(1, 1.0), (2, 0.5)],
            verdicts=[
                PredictorScore("never", ">= 1", 0, 0, {}),
                PredictorScore("net", ">= 0.5", 0.5, 0.5, {}, [(0.1, 1.0), (1.0, 0.2)]),
            ],
            title="title",
        )
        draw(tmp_path / "y.png", [], channel="skew", threshold=0.5, losses=[], verdicts=[], title="nothing")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_the_picture_of_a_sample_shows_its_channel_and_its_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distconv.jobs.mesh import picture

    figures: list[Any] = []
    monkeypatch.setattr(picture, "write_picture", lambda path, figure, dpi: figures.append((path, figure)))
    channel = np.arange(12.0).reshape(3, 4)
    label = (channel > 8).astype(np.uint8)
    picture.draw_sample(tmp_path / "x.png", channel, label, "skew", "shear")
    [(path, figure)] = figures
    assert path == tmp_path / "x.png"
    left, right = (axis for axis in figure.axes if axis.get_title())
    assert (left.get_title(), right.get_title()) == ("shear: skew", "label: 25.0 % of the cells")
    for axis, values in ((left, channel), (right, label)):
        [image] = axis.images
        np.testing.assert_array_equal(image.get_array(), values)
        assert image.origin == "lower"
    assert left.images[0].get_clim() == pytest.approx((0.11, 10.89))


def test_cells_that_are_found_missed_and_called_in_vain_have_colours_of_their_own() -> None:
    from distconv.jobs.mesh.picture import MeshExample, _outcome

    label, probability = np.array([[1, 1, 0, 0]]), np.array([[0.5, 0.4, 0.5, 0.4]])
    green, red, orange, white = _outcome(MeshExample("", label, label, probability), 0.5)[0].tolist()
    assert green[1] > max(green[0], green[2])
    assert red[0] > 0.5 > max(red[1], red[2])
    assert orange[0] > orange[1] > 0.5 > orange[2]
    assert white == [1, 1, 1]
