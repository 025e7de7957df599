"""Training of a segmentation model: stopped by a loss or weights that are NaN; its settings, networks and scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.errors import DistconvError
from distconv.jobs.mesh.samples import MeshSamples
from distconv.jobs.mesh.segmentation import MeshSettings, MeshTrainer, build
from distconv.jobs.mesh.synthetic_samples import write_synthetic
from distconv.layers.models import MODELS
from tests.distconv.layouts import raises_everywhere
from tests.jobs.mesh.mesh_files import GRIDS, SMALL, written


@pytest.mark.fault(40)
@pytest.mark.ranks(2)
def test_a_loss_that_is_not_finite_on_one_rank_stops_all(comm: Any, shared_tmp_path: Path) -> None:
    samples = MeshSamples(written(shared_tmp_path / "mesh.h5", comm), comm)
    trainer = MeshTrainer(SMALL, samples, dc.ProcessGrid(comm, **GRIDS[comm.size]))
    if comm.rank == 1:
        loss = trainer.loss
        trainer.loss = lambda *batch: loss(*batch) * torch.nan  # type: ignore[method-assign]
    before = {name: tensor.clone() for name, tensor in trainer.model.named_parameters()}
    batch = next(trainer.batches())
    text = raises_everywhere(comm, DistconvError, "step 1: the loss is nan", lambda: trainer.step(*batch.tensors))
    assert text.endswith("(on rank 1)")
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.named_parameters())
    samples.close()


@pytest.mark.fault(40)
@pytest.mark.ranks(2)
def test_weights_that_are_not_finite_are_not_saved(comm: Any, shared_tmp_path: Path) -> None:
    samples = MeshSamples(written(shared_tmp_path / "mesh.h5", comm), comm)
    trainer = MeshTrainer(SMALL, samples, dc.ProcessGrid(comm, **GRIDS[comm.size]))
    saved = str(shared_tmp_path / "saved")
    trainer.save(saved)
    trainer.step_count = 1
    if comm.rank == comm.size - 1:
        with torch.no_grad():
            trainer.model.predict.bias.fill_(torch.nan)
    message = "step 1: 'predict.bias' is no longer finite, so no checkpoint is written. Use a smaller --lr"
    raises_everywhere(comm, DistconvError, message, lambda: trainer.save(saved))
    assert trainer.resume(saved)
    assert trainer.step_count == 0
    samples.close()


def test_cells_count_for_the_family_of_their_sample(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "x.h5", (16, 16), train=7, heldout=1)
    samples = MeshSamples(tmp_path / "x.h5", MPI.COMM_SELF)
    samples.families["train"] = ["b", "b", "b", "b", "a", "a", "b"]
    found = MeshTrainer(MeshSettings("perceptron", 2, batch=3), samples, dc.ProcessGrid(MPI.COMM_SELF)).scores("train")
    assert found.families == ("a", "b")
    assert found.counts.sum((1, 2)).tolist() == [2 * 256, 5 * 256]
    with h5py.File(tmp_path / "x.h5") as file:
        labels = file["train/label"][()]
    assert found.counts[:, 1].sum(1).tolist() == [int(labels[[4, 5]].sum()), int(labels[[0, 1, 2, 3, 6]].sum())]
    samples.close()


def test_settings_and_networks_are_those_of_the_data() -> None:
    names = ("model", "width", "batch", "epochs", "optimizer", "lr", "warm_up", "weight_decay", "augment", "seed")
    found = {name: getattr(MeshSettings(), name) for name in names}
    assert found == dict(zip(names, ("unet", None, 4, 60, "adamw", 4e-3, 0.3, 1e-2, True, 0), strict=True))
    for settings in (MeshSettings("perceptron"), MeshSettings("perceptron", 5, seed=3)):
        width = settings.width or 64
        network = build(settings)
        kinds = [torch.nn.Conv2d, torch.nn.ReLU] * 2 + [torch.nn.Conv2d]
        assert [type(layer) for layer in network] == kinds  # type: ignore[call-overload]
        shapes = [tuple(parameter.shape) for parameter in network.parameters()]
        assert shapes == [(width, 18, 1, 1), (width,), (width, width, 1, 1), (width,), (1, width, 1, 1), (1,)]
        torch.manual_seed(settings.seed)
        assert torch.equal(next(network.parameters()), torch.nn.Conv2d(18, width, 1).weight)
    assert isinstance(build(MeshSettings("mesh1k", 4)), type(MODELS["mesh1k"](width=4)))


def test_predictions_are_probabilities_and_notes_have_the_normalization(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "x.h5", (16, 16), train=2, heldout=1)
    samples = MeshSamples(tmp_path / "x.h5", MPI.COMM_SELF)
    trainer = MeshTrainer(MeshSettings("perceptron", 2, batch=2), samples, dc.ProcessGrid(MPI.COMM_SELF))
    (batch,) = samples.loader("heldout", trainer.grid, 2).epoch(0)
    found = trainer.predict(batch.tensors[0]).local
    torch.testing.assert_close(found, torch.sigmoid(trainer.model(batch.tensors[0]).local[:, 0]))
    with h5py.File(tmp_path / "x.h5") as file:
        inputs = file["train/input"][()].astype(np.float64)
    assert trainer.notes["task"] == "mesh"
    assert trainer.notes["mean"] == pytest.approx(inputs.mean((0, 2, 3)), rel=1e-5, abs=1e-6)
    assert trainer.notes["std"] == pytest.approx(inputs.std((0, 2, 3)), rel=1e-5)
    assert trainer.criterion.dice and trainer.criterion.classes == 1
    samples.close()
