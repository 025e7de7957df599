"""Networks of predictions, from a run, its folders, or a file; errors for incomplete runs."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import distconv as dc
from distconv.errors import CheckpointError
from distconv.jobs.mesh.samples import MeshSamples
from distconv.jobs.mesh.segmentation import MeshTrainer
from distconv.jobs.prediction import network
from distconv.jobs.prediction.network import build_network, distribute_network, find_network
from distconv.jobs.training.model_factory import ModelError
from tests.distconv.data.sample_files import common
from tests.jobs.mesh.mesh_files import SMALL, written
from tests.jobs.prediction import nets

pytestmark = pytest.mark.ranks(1, 2)


def test_a_file_of_weights_needs_a_model_that_fits(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "net.pt"
    if comm.rank == 0:
        nets.save(str(path))
    comm.Barrier()
    of = find_network(path, comm)
    assert of.task == "" and of.folder is None
    options = argparse.Namespace(model="tests.jobs.prediction.nets:volume_net", classes=3, width=None)
    state = build_network(of, comm, channels=2, options=options).state_dict()
    saved = torch.load(path, weights_only=True)
    assert all(torch.equal(state[name], saved[name].float()) for name in saved)
    with pytest.raises(ModelError) as caught:
        build_network(of, comm, channels=4, options=options)
    assert "the weights do not fit --model" in common(comm, caught.value)
    with pytest.raises(ModelError, match=r"holds weights only\. Name the network with --model"):
        build_network(of, comm, channels=2, options=argparse.Namespace(model=None))


def test_what_is_neither_is_refused(comm: Any, shared_tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        find_network(shared_tmp_path, comm)
    assert "neither a finished checkpoint nor a file of weights" in common(comm, caught.value)
    dc.save_checkpoint(shared_tmp_path / "own", 1, torch.nn.Linear(2, 2), comm=comm)
    with pytest.raises(CheckpointError, match="the settings of the training are missing"):
        find_network(shared_tmp_path / "own", comm)


def test_a_run_is_known_by_its_folder_and_gives_the_average_of_its_weights_and_its_statistics(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = MeshSamples(written(shared_tmp_path / "mesh.h5", comm), comm)
    settings = replace(SMALL, ema=0.5, batch_norm="local")
    trainer = MeshTrainer(settings, samples, dc.ProcessGrid(comm, h=comm.size))
    for batch in trainer.loader.epoch(0):
        trainer.step(*batch.tensors)
    trainer.save(str(shared_tmp_path / "run" / "checkpoints"))
    of, same = (find_network(shared_tmp_path / "run" / place, comm) for place in ("", "checkpoints"))
    assert of.digest == same.digest and of.task == "mesh"
    assert of.notes["mean"] == samples.moments.mean.tolist() and len(of.notes["std"]) == 18
    scopes = []
    parallelize = network.parallelize
    monkeypatch.setattr(
        network,
        "parallelize",
        lambda *given, **named: scopes.append(named["batch_norm"]) or parallelize(*given, **named),
    )
    plain = build_network(of, comm, channels=18, options=argparse.Namespace())
    model = distribute_network(of, plain, trainer.grid, "cpu", torch.float64)
    average, newest = dict(trainer.evaluation_model.named_parameters()), dict(trainer.model.named_parameters())
    assert scopes == ["local"]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(dc.gather(parameter), dc.gather(average[name]), rtol=0, atol=0)
    assert any(not torch.equal(dc.gather(average[name]), dc.gather(newest[name])) for name in newest)
    samples.close()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("task", ["classify", "segmentation"])
def test_a_network_of_a_run_is_built_with_what_the_run_says(
    comm: Any, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    for each in ("classify", "segmentation"):
        name = {"classify": "build_classifier", "segmentation": "build_segmenter"}[each]
        monkeypatch.setattr(network, name, lambda model, comm, each=each, **more: made.append((each, model, more)))
    of = network.TrainedNetwork(
        Path("run"), task, {"model": "net", "width": 6, "seed": 3, "loss": "x"}, {"classes": 5}, "digest"
    )
    build_network(of, comm, channels=2, options=argparse.Namespace(model="other", classes=9, width=8))
    assert made == [(task, "net", {"seed": 3, "in_channels": 2, "classes": 5, "width": 6})]


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("task", "notes", "names"),
    [
        ("mesh", {}, ("input", "label")),
        ("classify", {}, ("image", "label")),
        ("segmentation", {"names": ["volume", "organ"]}, ("volume", "organ")),
    ],
)
def test_datasets_have_the_names_of_the_run(
    comm: Any, task: str, notes: dict[str, Any], names: tuple[str, str]
) -> None:
    assert network.TrainedNetwork(Path("run"), task, {}, notes, "digest").names == names
