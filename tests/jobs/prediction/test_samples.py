"""What is predicted: which datasets are found, how values are scaled, and probabilities of outputs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import distconv as dc
from distconv.errors import DataError
from distconv.jobs.prediction.network import TrainedNetwork
from distconv.jobs.prediction.samples import loader_field, open_inputs, probabilities

pytestmark = pytest.mark.ranks(1, 2)

X = np.random.default_rng(3).normal(2, 3, (4, 2, 6, 5))


def options(path: Path, **more: Any) -> argparse.Namespace:
    given = {"data": path, "image_name": None, "label_name": None, "readers": 1, "normalise_as": None}
    return argparse.Namespace(**given | more)


def written(comm: Any, path: Path, *names: str) -> Path:
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            for name in names:
                file[name] = X if "label" not in name else X[:, 0] > 2
    comm.Barrier()
    return path


def of_task(task: str = "") -> TrainedNetwork:
    return TrainedNetwork(Path(), task, {}, {}, "")


@pytest.mark.parametrize(
    ("names", "task", "found", "label"),
    [
        (("image", "label"), "", "image", "label"),
        (("train/image", "test/image", "test/label"), "classify", "test/image", "test/label"),
        (("train/input", "train/label", "heldout/input"), "mesh", "heldout/input", None),
        (("train/image", "train/label"), "", "train/image", "train/label"),
    ],
)
def test_held_out_samples_come_first(
    comm: Any, shared_tmp_path: Path, names: tuple[str, ...], task: str, found: str, label: str | None
) -> None:
    inputs = open_inputs(options(written(comm, shared_tmp_path / "a.h5", *names)), of_task(task), comm)
    assert inputs.name == found and (inputs.labels is not None) == (label is not None)
    assert label is None or inputs.label == label
    inputs.close()


def test_a_name_that_is_given_is_taken(comm: Any, shared_tmp_path: Path) -> None:
    path = written(comm, shared_tmp_path / "a.h5", "image", "ct", "label", "other_label")
    inputs = open_inputs(options(path, image_name="ct", label_name="other_label"), of_task(), comm)
    assert (inputs.name, inputs.label) == ("ct", "other_label")
    for more in ({"image_name": "none"}, {"label_name": "none"}):
        with pytest.raises(DataError, match="there is no dataset 'none'"):
            open_inputs(options(path, **more), of_task(), comm)
    with pytest.raises(DataError, match="there is no dataset 'input'"):
        open_inputs(options(path), of_task("mesh"), comm)


def test_values_are_scaled_as_in_training_or_as_those_of_other_samples(comm: Any, shared_tmp_path: Path) -> None:
    path = written(comm, shared_tmp_path / "a.h5", "image")
    inputs = open_inputs(options(path), of_task(), comm)

    def of(**notes: Any) -> TrainedNetwork:
        return TrainedNetwork(path, "", {}, notes, "")

    assert loader_field(options(path), of(), inputs, torch.float64).shift is None
    noted = loader_field(options(path), of(mean=[1.0, 2.0], std=[3.0, 4.0]), inputs, torch.float64)
    assert noted.shift.tolist() == [1, 2] and noted.scale.tolist() == [3, 4]
    other = loader_field(options(path, normalise_as=path), of(mean=[1.0, 2.0], std=[3.0, 4.0]), inputs, torch.float64)
    assert np.allclose(other.shift, X.mean((0, 2, 3))) and np.allclose(other.scale, X.std((0, 2, 3)))
    with pytest.raises(DataError, match="has 2 channels, but the network was trained with 3"):
        loader_field(options(path), of(mean=[1.0] * 3, std=[1.0] * 3), inputs, torch.float64)


def test_probabilities_are_of_classes_or_of_the_one_class(comm: Any) -> None:
    grid = dc.ProcessGrid(comm, h=comm.size)
    x = torch.from_numpy(X)
    assert torch.allclose(dc.gather(probabilities(dc.scatter(x, grid))), torch.softmax(x, 1))
    assert torch.allclose(dc.gather(probabilities(dc.scatter(x[:, :1], grid))), torch.sigmoid(x[:, :1]))
