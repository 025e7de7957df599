"""What a prediction is made with: a run and its folders, or a file; what says too little is refused."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

import distconv as dc
from distconv.errors import CheckpointError
from distconv.jobs.mesh.samples import MeshSamples
from distconv.jobs.mesh.segmentation import Trainer
from distconv.jobs.prediction.network import build, on_grid, trained
from distconv.jobs.training.model_factory import ModelError
from tests.distconv.data.sample_files import common
from tests.jobs.mesh.mesh_files import SMALL, written
from tests.jobs.prediction import nets

pytestmark = pytest.mark.ranks(1, 2)


def test_a_run_is_known_by_its_folder_and_gives_its_network(comm: Any, shared_tmp_path: Path) -> None:
    samples = MeshSamples(written(shared_tmp_path / "mesh.h5", comm), comm)
    trainer = Trainer(SMALL, samples, dc.ProcessGrid(comm, h=comm.size))
    trainer.step(*next(iter(trainer.loader.epoch(0))).tensors)
    trainer.save(str(shared_tmp_path / "run" / "checkpoints"))
    places = [shared_tmp_path / "run", shared_tmp_path / "run" / "checkpoints"]
    found = [trained(place, comm) for place in places]
    assert found[0].digest == found[1].digest and found[0].task == "mesh"
    assert found[0].notes["mean"] == samples.moments.mean.tolist() and len(found[0].notes["std"]) == 18
    (batch,) = list(samples.loader("heldout", trainer.grid, 4, dtype=torch.float64).epoch(0))
    with torch.no_grad():
        expected = dc.gather(trainer.model.eval()(batch.tensors[0]))
        plain = build(found[0], comm, channels=18, options=argparse.Namespace())
        model = on_grid(found[0], plain, trainer.grid, "cpu", torch.float64)
        assert torch.equal(dc.gather(model(batch.tensors[0])), expected)
    samples.close()


def test_a_file_of_weights_needs_a_model_that_fits(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "net.pt"
    if comm.rank == 0:
        nets.save(str(path))
    comm.Barrier()
    of = trained(path, comm)
    assert of.task == "" and of.folder is None
    options = argparse.Namespace(model="tests.jobs.prediction.nets:volume_net", classes=3, width=None)
    state = build(of, comm, channels=2, options=options).state_dict()
    saved = torch.load(path, weights_only=True)
    assert all(torch.equal(state[name], saved[name].float()) for name in saved)
    with pytest.raises(ModelError) as caught:
        build(of, comm, channels=4, options=options)
    assert "the weights do not fit --model" in common(comm, caught.value)
    with pytest.raises(ModelError, match="holds weights alone: give the network with --model"):
        build(of, comm, channels=2, options=argparse.Namespace(model=None))


def test_what_is_neither_is_refused(comm: Any, shared_tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        trained(shared_tmp_path, comm)
    assert "there is no finished checkpoint, and no file of weights" in common(comm, caught.value)
    dc.save_checkpoint(shared_tmp_path / "own", 1, torch.nn.Linear(2, 2), comm=comm)
    with pytest.raises(CheckpointError, match="does not say what it was trained for"):
        trained(shared_tmp_path / "own", comm)
