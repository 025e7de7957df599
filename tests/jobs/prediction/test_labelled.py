"""Whose samples are opened as for training. The predictions themselves: tests/jobs/commands/test_predict.py."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

from distconv.data import open_source
from distconv.distribution import Interval
from distconv.errors import DataError
from distconv.grid import ProcessGrid
from distconv.jobs.images.classification import ImageSettings, ImageTrainer
from distconv.jobs.images.samples import ImageSamples
from distconv.jobs.prediction import labelled
from distconv.jobs.prediction.labelled import is_labelled, predict
from distconv.jobs.prediction.network import TrainedNetwork, find_network
from distconv.jobs.sequence import samples as sequence_samples
from distconv.jobs.sequence.mfcc import CoefficientRecipe
from distconv.jobs.sequence.trainer import SequenceSettings, SequenceTrainer
from distconv.writing import open_output
from tests.jobs.images import image_files


@pytest.mark.parametrize(
    ("task", "data", "expected"),
    [
        ("pointcloud", "clouds.h5", True),
        ("sequence", "embedded", True),
        ("classify", "digits", True),
        ("classify", "mnist", True),
        ("classify", "images.h5", False),
        ("classify", "images.nc", False),
        ("mesh", "mesh.h5", False),
        ("", "ct.zarr", False),
    ],
)
def test_arrays_are_read_box_by_box(tmp_path: Path, task: str, data: str, expected: bool) -> None:
    (tmp_path / "mnist").mkdir()
    path = tmp_path / data if data == "mnist" else Path(data)
    assert is_labelled(TrainedNetwork(path, task, {}, {}, ""), path) == expected


def options_of(data: Path, out: Path) -> argparse.Namespace:
    return argparse.Namespace(data=data, out=out, format="h5", grid=None)


def written(out: Path) -> torch.Tensor:
    source = open_source(out / "prediction.h5", ["prediction"], MPI.COMM_SELF)
    shape = source.shape("prediction")
    return torch.from_numpy(source.read("prediction", tuple(Interval(0, extent) for extent in shape)))


def test_images_are_predicted_with_the_averaged_weights_and_the_scaling_of_the_training(tmp_path: Path) -> None:
    """The moments of the run are those of twelve images only."""
    (tmp_path / "data").mkdir()
    image_files.write_mnist(tmp_path / "data")
    samples = ImageSamples(tmp_path / "data", MPI.COMM_SELF, limit=12)
    settings = ImageSettings("lenet5", batch=4, accumulate=2, ema=0.5, epochs=1, lr=0.1, seed=3)
    trainer = ImageTrainer(settings, samples, ProcessGrid(MPI.COMM_SELF))
    for batch in trainer.batches():
        trainer.step(*batch.tensors)
    trainer.save(str(tmp_path / "run"))
    trained = find_network(tmp_path / "run", MPI.COMM_SELF)
    out = tmp_path / "new" / "out"
    path, group, found = predict(options_of(tmp_path / "data", out), trained, "cpu", MPI.COMM_SELF)
    expected = torch.softmax(torch.cat([logits for _, logits in trainer.predictions("test")]), 1)
    assert (path, group) == (out / "prediction.h5", "test")
    torch.testing.assert_close(written(out), expected)
    score = trainer.evaluate("test")
    assert (found.samples, found.correct, found.loss) == (21, score.correct, pytest.approx(score.loss, rel=1e-5))
    with pytest.raises(DataError):  # a finished file
        predict(options_of(tmp_path / "data", out), trained, "cpu", MPI.COMM_SELF)


def test_embedded_sequences_are_predicted_as_they_were_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_samples, "STREAMS", {"train": (6, 0)})
    samples = sequence_samples.SequenceSamples(None, MPI.COMM_SELF, length=11, recipe=CoefficientRecipe())
    trainer = SequenceTrainer(SequenceSettings(width=3, length=11, batch=4), samples, ProcessGrid(MPI.COMM_SELF))
    trainer.save(str(tmp_path / "run"))
    seen: list[Any] = []
    monkeypatch.setattr(
        labelled, "open_output", lambda *given, **more: seen.append(more) or open_output(*given, **more)
    )
    trained = find_network(tmp_path / "run", MPI.COMM_SELF)
    _, group, found = predict(options_of(Path("embedded"), tmp_path), trained, "cpu", MPI.COMM_SELF)
    expected = torch.softmax(torch.cat([logits for _, logits in trainer.predictions("train")]), 1)
    assert (group, found.samples) == ("train", 6) and seen == [
        {"note": {"weights": trained.digest, "data": "embedded"}}
    ]
    torch.testing.assert_close(written(tmp_path), expected)
