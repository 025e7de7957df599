"""Scores of predictions: each place counts once on any grid; and the picture of one to three dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distconv as dc
from distconv.data import open_source
from distconv.errors import DataError
from distconv.jobs.prediction.samples import PredictionInputs
from distconv.jobs.prediction.scores import draw, score
from tests.distconv.data.sample_files import common

pytestmark = pytest.mark.ranks(1, 2, 4)

RANDOM = np.random.default_rng(8)
GRIDS = {1: ["n=1"], 2: ["h=2", "n=2"], 4: ["h=2,w=2", "n=2,h=2", "r=4"]}


def made(comm: Any, folder: Path, predicted: Any, label: Any) -> PredictionInputs:
    if comm.rank == 0:
        for name, values in {"prediction": predicted, "image": predicted, "label": label}.items():
            (folder / name).mkdir(exist_ok=True)
            np.save(folder / name / f"{name}.npy", values)
    comm.Barrier()
    image, labels = (open_source(folder / name, [name], comm) for name in ("image", "label"))
    return PredictionInputs(image, "image", labels, "label")


@pytest.mark.parametrize("classes", [1, 3])
def test_counts_are_those_of_numpy_on_any_grid(comm: Any, shared_tmp_path: Path, classes: int) -> None:
    predicted = RANDOM.random((5, classes, 7, 9)) if comm.rank == 0 else None
    label = RANDOM.integers(0, max(2, classes), (5, 7, 9)) if comm.rank == 0 else None
    predicted, label = comm.bcast((predicted, label))
    inputs = made(comm, shared_tmp_path, predicted, label)
    called = (predicted[:, 0] >= 0.5).astype(int) if classes == 1 else predicted.argmax(1)
    for text in GRIDS[comm.size]:
        found = score(shared_tmp_path / "prediction", inputs, dc.ProcessGrid(comm, **dc.parse_grid(text)))
        assert found is not None
        assert (found.count, found.correct) == (315, int((called == label).sum()))
        of = [1] if classes == 1 else range(3)
        dice = [2 * ((called == k) & (label == k)).sum() / ((called == k).sum() + (label == k).sum()) for k in of]
        assert found.dice == pytest.approx(dice, abs=1e-15)
        ignored = score(shared_tmp_path / "prediction", inputs, dc.ProcessGrid(comm, **dc.parse_grid(text)), 0)
        assert ignored is not None and ignored.count == int((label != 0).sum())


def test_labels_of_another_shape_are_refused_and_without_any_there_is_no_score(
    comm: Any, shared_tmp_path: Path
) -> None:
    inputs = made(comm, shared_tmp_path, np.zeros((2, 3, 4, 5)), np.zeros((2, 4, 6)))
    grid = dc.ProcessGrid(comm, h=comm.size)
    with pytest.raises(DataError) as caught:
        score(shared_tmp_path / "prediction", inputs, grid)
    assert "the shape of dataset 'label' is (2, 4, 6), but that of the predictions is (2, 3, 4, 5)" in common(
        comm, caught.value
    )
    assert score(shared_tmp_path / "prediction", PredictionInputs(inputs.source, "image", None, ""), grid) is None


def test_classes_of_samples_count_each_sample_once(comm: Any, shared_tmp_path: Path) -> None:
    predicted = np.eye(4)[[0, 1, 2, 2, 0]]
    inputs = made(comm, shared_tmp_path, predicted, np.array([0, 1, 2, 3, 0]))
    found = score(shared_tmp_path / "prediction", inputs, dc.ProcessGrid(comm, n=comm.size))
    assert found is not None and (found.count, found.correct) == (5, 4)
    assert found.dice == pytest.approx([1, 1, 2 / 3, 0])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("shape", [(2, 3, 20), (2, 1, 9, 11), (2, 3, 4, 9, 600)])
def test_a_picture_of_any_dimensions(comm: Any, tmp_path: Path, shape: tuple[int, ...]) -> None:
    pytest.importorskip("matplotlib")
    inputs = made(comm, tmp_path, RANDOM.random(shape), np.zeros((shape[0], *shape[2:])))
    draw(tmp_path / "a.png", tmp_path / "prediction", inputs, "title")
    assert (tmp_path / "a.png").stat().st_size > 5000
