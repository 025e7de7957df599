"""Scores of predictions: each place counts once on any grid; and the picture of one to three dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distconv as dc
from distconv.data import open_source
from distconv.errors import DataError
from distconv.jobs.prediction import scores
from distconv.jobs.prediction.samples import PredictionInputs
from distconv.jobs.prediction.scores import draw, score
from tests.distconv.data.sample_files import common
from tests.jobs.approved.figures import approve_figures

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
def test_figures_of_any_dimensions_are_as_approved(comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    approve_figures(monkeypatch, scores, "prediction")
    for shape in ((2, 3, 20), (5, 1, 3, 4), (1, 3, 4, 2, 1100), (2, 4)):
        folder = tmp_path / str(len(shape))
        folder.mkdir()
        values = np.sin(np.arange(np.prod(shape))).reshape(shape)
        inputs = made(comm, folder, values, np.arange(shape[0] * int(np.prod(shape[2:]))).reshape(shape[0], *shape[2:]))
        if len(shape) == 5:
            inputs = PredictionInputs(inputs.source, "image", None, "")
        draw(Path("a.png"), folder / "prediction", inputs, f"a title of {len(shape)}")
