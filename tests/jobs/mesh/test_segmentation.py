"""Training of a segmentation model: resumed bit for bit, by a plan as over a grid, stopped by a loss that is NaN."""

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
from tests.jobs.mesh.mesh_files import GRIDS, SMALL, on_ranks, written
from tests.jobs.training.resumed_runs import assert_resumes_bit_for_bit


@pytest.mark.long
@pytest.mark.fault(66)
@on_ranks
def test_a_resumed_run_takes_the_same_steps_bit_for_bit(comm: Any, shared_tmp_path: Path) -> None:
    settings = MeshSettings("unet", 2, batch=4, epochs=5, dtype="float64", optimizer="adam")
    samples = MeshSamples(written(shared_tmp_path / "mesh.h5", comm), comm)
    grid = dc.ProcessGrid(comm, **GRIDS[comm.size])
    # In the middle of the second epoch.
    assert_resumes_bit_for_bit(lambda: MeshTrainer(settings, samples, grid), shared_tmp_path, 3)
    samples.close()


PLANS = {
    1: {"*": {"n": 1}},
    2: {"*": {"h": 2}, "down.1.*": {"n": 2}, "predict": {"w": 2}},
    4: {"*": {"h": 2, "w": 2}, "down.1.*": {"n": 2, "c": 2}, "up.*": {"n": 2, "h": 2}, "predict": {"w": 2}},
}


@pytest.mark.long
@pytest.mark.ranks(2, 4)
def test_a_plan_takes_the_same_steps_as_a_grid_and_scores_alike(comm: Any, shared_tmp_path: Path) -> None:
    samples = MeshSamples(written(shared_tmp_path / "mesh.h5", comm), comm)
    found = []
    for place in (dc.ProcessGrid(comm, **GRIDS[comm.size]), dc.Plan(PLANS[comm.size])):
        trainer = MeshTrainer(SMALL, samples, place)
        losses = [trainer.step(*batch.tensors) for batch in trainer.batches()]
        found.append((losses, trainer.scores("heldout").counts))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-9)
    assert np.array_equal(found[1][1], found[0][1])
    samples.close()


@pytest.mark.fault(40)
@on_ranks
def test_a_loss_that_is_not_finite_stops_before_the_weights_change(comm: Any, shared_tmp_path: Path) -> None:
    samples = MeshSamples(written(shared_tmp_path / "mesh.h5", comm), comm)
    trainer = MeshTrainer(SMALL, samples, dc.ProcessGrid(comm, **GRIDS[comm.size]))
    with torch.no_grad():
        trainer.model.predict.bias.fill_(torch.inf)
    before = {name: tensor.clone() for name, tensor in trainer.model.named_parameters()}
    with pytest.raises(DistconvError, match=r"step 1: the loss is (inf|nan). Use a smaller --lr"):
        trainer.step(*next(trainer.batches()).tensors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.named_parameters())
    assert not Path(shared_tmp_path / "saved").exists()


@pytest.mark.fault(40)
@pytest.mark.ranks(2, 4)
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
@pytest.mark.ranks(1, 2)
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
