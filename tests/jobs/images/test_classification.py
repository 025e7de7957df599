"""Training of a classifier: the same steps on every grid and by a plan, resumed bit for bit; scores."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.jobs.images import classification
from distconv.jobs.images.classification import ImageSettings, ImageTrainer
from distconv.jobs.images.samples import ImageSamples
from distconv.jobs.training.model_factory import ModelError
from tests.jobs.approved import assert_approved_defaults
from tests.jobs.images import image_files
from tests.jobs.images.grids import ONE_GRID, grid_of, planned
from tests.jobs.images.image_files import arrays, written
from tests.jobs.training.resumed_runs import assert_resumes_bit_for_bit

GRIDS = {2: ["n=2", "h=2"], 3: ["h=3"], 4: ["h=2,w=2"]}


@pytest.mark.long
@pytest.mark.fault(44)
@pytest.mark.ranks(*GRIDS)
def test_losses_on_any_grid_equal_those_of_plain_torch(comm: Any, shared_tmp_path: Path) -> None:
    settings = ImageSettings("resnet20", 4, batch=9, steps=4, lr=0.02, weight_decay=1e-3, dtype="float64")
    settings = replace(settings, augment="crop,flip")
    folder = written(comm, shared_tmp_path, image_files.write_cifar)
    alone = ImageTrainer(settings, ImageSamples(folder, MPI.COMM_SELF), dc.ProcessGrid(MPI.COMM_SELF))
    # The reference sees ordinary tensors. All epochs end with a smaller batch.
    expected = [alone.step(*(tensor.local for tensor in batch.tensors)) for batch in alone.batches()]
    score = alone.evaluate("test")
    samples = ImageSamples(folder, comm)
    for text in GRIDS[comm.size]:
        trainer = ImageTrainer(settings, samples, dc.ProcessGrid(comm, **dc.parse_grid(text)))
        losses = [trainer.step(*batch.tensors) for batch in trainer.batches()]
        assert losses == pytest.approx(expected, rel=1e-10), text
        found = trainer.evaluate("test")
        assert (found.samples, found.correct) == (score.samples, score.correct)
        assert found.loss == pytest.approx(score.loss, rel=1e-9)


@pytest.mark.long
@pytest.mark.fault(67)
@pytest.mark.ranks(4)
def test_a_plan_takes_the_same_steps_and_any_grid_goes_on_from_its_checkpoint(comm: Any, shared_tmp_path: Path) -> None:
    samples = ImageSamples(written(comm, shared_tmp_path), comm)
    settings = ImageSettings("lenet5", batch=16, steps=6, lr=0.1, dtype="float64", augment="crop")
    trainer = ImageTrainer(settings, samples, grid_of(comm))
    expected = [trainer.step(*batch.tensors) for batch in trainer.batches()]
    first = ImageTrainer(settings, samples, dc.Plan.load(planned(comm, shared_tmp_path), comm))
    losses = []
    for batch in first.batches():
        losses.append(first.step(*batch.tensors))
        if first.step_count == 4:
            first.save(str(shared_tmp_path / "saved"))
    assert losses == pytest.approx(expected, rel=1e-10)
    assert first.evaluate("test").correct == trainer.evaluate("test").correct
    second = ImageTrainer(settings, samples, grid_of(comm))
    assert second.resume(str(shared_tmp_path / "saved"))
    assert [second.step(*batch.tensors) for batch in second.batches()] == pytest.approx(expected[4:], rel=1e-10)


@pytest.mark.ranks(2, 4)
def test_sharded_weights_take_the_same_steps_and_full_ones_go_on_from_their_checkpoint(
    comm: Any, shared_tmp_path: Path
) -> None:
    samples = ImageSamples(written(comm, shared_tmp_path), comm)
    full = ImageSettings("lenet5", batch=16, steps=6, optimizer="adam", lr=0.01, dtype="float64", ema=0.5)
    expected, saved = [], str(shared_tmp_path / "saved")
    trainers = [ImageTrainer(replace(full, shard_weights=axes), samples, grid_of(comm)) for axes in (None, True)]
    for plain, sharded in zip(*(trainer.batches() for trainer in trainers), strict=True):
        expected.append(trainers[0].step(*plain.tensors))
        assert trainers[1].step(*sharded.tensors) == pytest.approx(expected[-1], rel=1e-10)
        if len(expected) == 4:
            trainers[1].save(saved)
    scores = [trainer.evaluate("test") for trainer in trainers]
    assert scores[1].correct == scores[0].correct and scores[1].loss == pytest.approx(scores[0].loss, rel=1e-10)
    assert all(isinstance(parameter, dc.DistTensor) for parameter in trainers[1].model.parameters())
    again = ImageTrainer(full, samples, grid_of(comm))
    assert again.resume(saved)
    assert [again.step(*batch.tensors) for batch in again.batches()] == pytest.approx(expected[4:], rel=1e-10)


@pytest.mark.fault(66)
@pytest.mark.ranks(2)
def test_losses_in_half_precision_are_near_the_others(comm: Any, shared_tmp_path: Path) -> None:
    samples = ImageSamples(written(comm, shared_tmp_path), comm)
    losses = {}
    for precision in ("full", "bf16"):
        trainer = ImageTrainer(
            ImageSettings("lenet5", batch=16, steps=5, lr=0.1, precision=precision), samples, grid_of(comm)
        )
        losses[precision] = [trainer.step(*batch.tensors) for batch in trainer.batches()]
    assert losses["bf16"] == pytest.approx(losses["full"], rel=1e-2)
    assert all(half != full for half, full in zip(losses["bf16"], losses["full"], strict=True))
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in trainer.model.parameters() if p.grad is not None)
    trainer.save(str(shared_tmp_path / "saved"))
    full = ImageTrainer(ImageSettings("lenet5", batch=16, steps=5, lr=0.1), samples, grid_of(comm))
    with pytest.raises(dc.CheckpointError, match="precision was 'bf16' and is 'full'"):
        full.resume(str(shared_tmp_path / "saved"))
    with pytest.raises(dc.DistconvError, match="--precision bf16: needs --dtype float32, not float64"):
        ImageTrainer(ImageSettings("lenet5", precision="bf16", dtype="float64"), samples, grid_of(comm))


@pytest.mark.long
@pytest.mark.ranks(2)
def test_a_resumed_run_takes_the_same_steps_bit_for_bit(comm: Any, shared_tmp_path: Path) -> None:
    """With dropout and batch norm, in the middle of the second epoch."""
    settings = ImageSettings("vgg11_bn", 2, batch=9, epochs=2, optimizer="adam", lr=0.01, augment="crop,flip")
    samples = ImageSamples(written(comm, shared_tmp_path, image_files.write_cifar), comm)
    make = lambda: ImageTrainer(settings, samples, grid_of(comm))  # noqa: E731
    assert_resumes_bit_for_bit(make, shared_tmp_path, 4, lambda first: first.evaluate("test"))


@pytest.mark.ranks(4)
def test_every_sample_counts_once(comm: Any, shared_tmp_path: Path) -> None:
    """Batches that do not divide, ranks without a sample, replicas."""
    folder = written(comm, shared_tmp_path)
    samples = ImageSamples(folder, comm)
    scores = []
    for text in (ONE_GRID[comm.size], f"n={comm.size}", f"r={comm.size}", f"d={comm.size}"):
        trainer = ImageTrainer(ImageSettings(batch=8), samples, dc.ProcessGrid(comm, **dc.parse_grid(text)))
        scores.append(trainer.evaluate("test"))
    assert {score.samples for score in scores} == {21}
    assert len({score.correct for score in scores}) == 1
    logits = torch.cat([logits for _, logits in trainer.predictions("test")])
    labels = torch.from_numpy(arrays(21, (1, 28, 28))[1]).long()
    assert scores[0].correct == int((logits.argmax(1) == labels).sum())
    assert scores[0].loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)


@pytest.mark.parametrize(("classes", "fine"), [(9, False), (10, True), (12, True)])
def test_a_classifier_has_an_answer_for_each_class(tmp_path: Path, classes: int, fine: bool) -> None:
    image_files.write_mnist(tmp_path)
    samples = ImageSamples(tmp_path, MPI.COMM_SELF)
    trainer = ImageTrainer(ImageSettings(), samples, dc.ProcessGrid(MPI.COMM_SELF))
    with nullcontext() if fine else pytest.raises(ModelError, match=r"are .*, 9.* with at least 10 classes"):
        trainer.loss(torch.zeros(2, classes), torch.tensor([0, 1]))


def test_settings_are_as_approved_and_reach_the_network_and_the_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_approved_defaults("images", ImageSettings())
    seen: list[Any] = []

    def build(model: str, comm: Any, **options: Any) -> torch.nn.Module:
        seen.append((model, options))
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))

    def loader(group: str, grid: Any, batch: int, **options: Any) -> Any:
        seen.append((group, batch, options))
        return SimpleNamespace(samples=5, steps=1)

    moments = SimpleNamespace(mean=np.array([1.5]), std=np.array([2.5]))
    samples: Any = SimpleNamespace(comm=MPI.COMM_SELF, extents=(1, 3, 4), classes=3, loader=loader, moments=moments)
    monkeypatch.setattr(classification, "build_classifier", build)
    monkeypatch.setattr(classification, "accumulate_batches", lambda parts, count: (parts, count))
    settings = ImageSettings("mine", 7, batch=6, accumulate=2, seed=4, augment="flip", epochs=1, dtype="float64")
    settings = replace(settings, memory_format="channels_last")
    trainer = ImageTrainer(settings, samples, dc.ProcessGrid(MPI.COMM_SELF))
    trainer.batches_of("test")
    assert seen[0] == ("mine", {"seed": 4, "in_channels": 1, "classes": 3, "width": 7})
    form = {"memory_format": torch.channels_last}
    training = {"seed": 4, "augment": "flip", **settings.loader_options("cpu"), **form}
    assert seen[1:] == [("train", 3, training), ("test", 6, settings.evaluation_options("cpu") | form)]
    assert trainer.loader[1] == 2
    assert trainer.notes == {"task": "classify", "classes": 3, "mean": [1.5], "std": [2.5]}


def test_a_model_of_a_pipeline_is_tried_on_one_image_before_it_is_split() -> None:
    samples: Any = SimpleNamespace(comm=MPI.COMM_SELF, extents=(2, 3, 4), classes=5)
    good = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(24), torch.nn.Linear(24, 5)).double()
    settings = ImageSettings("mine", dtype="float64")
    classification._check_one_image(good, settings, samples, "cpu")
    assert not good.training and good[1].num_batches_tracked == 0
    with pytest.raises(ModelError, match=r"--model mine fails on images of \(2, 3, 4\): RuntimeError: mat1 and mat2"):
        classification._check_one_image(torch.nn.Linear(9, 5).double(), settings, samples, "cpu")
    for wrong, shape in ((lambda x: x, r"\(1, 2, 3, 4\)"), (lambda x: [x], r"\('list',\)")):
        model = torch.nn.Module()
        model.forward = wrong  # type: ignore[method-assign, assignment]
        with pytest.raises(ModelError, match=rf"the outputs for images of \(2, 3, 4\) are {shape}, but a classifier"):
            classification._check_one_image(model, settings, samples, "cpu")
