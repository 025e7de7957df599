"""Checkpoints of a training: written beside the steps, gone on from bit for bit, refused if of something else."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distconv as dc
from distconv import checkpoint
from distconv.errors import CheckpointError
from distconv.jobs.images.classification import ImageSettings, ImageTrainer
from distconv.jobs.images.samples import ImageSamples
from distconv.jobs.training.recovery import Recoverable
from tests.distconv.checkpoint.damage import refused
from tests.jobs.images.grids import grid_of
from tests.jobs.images.image_files import write_cifar, written

on_ranks = pytest.mark.ranks(1, 2)


def trainer_on(comm: Any, folder: Path, optimizer: str = "sgd") -> ImageTrainer:
    settings = ImageSettings("lenet5", batch=16, steps=8, optimizer=optimizer, lr=0.01, dtype="float64", augment="crop")
    return ImageTrainer(settings, ImageSamples(folder, comm), grid_of(comm))


@pytest.mark.long
@pytest.mark.fault(66)
@pytest.mark.ranks(2)
def test_what_is_saved_beside_the_steps_is_as_it_was_before_them(comm: Any, shared_tmp_path: Path) -> None:
    folder, saved = written(comm, shared_tmp_path), str(shared_tmp_path / "saved")
    first, losses = trainer_on(comm, folder, "adam"), []
    for batch in first.batches():
        losses.append(first.step(*batch.tensors))
        if first.step_count == 3:
            first.start_saving(saved)
            assert checkpoint.newest(saved, comm) is None
        if first.step_count == 6:
            first.finish_saving()
            assert first.checkpoints_written == first.checkpoints_begun == 1
    second = trainer_on(comm, folder, "adam")
    assert second.resume(saved)
    assert [second.step(*batch.tensors) for batch in second.batches()] == losses[3:]
    for one, other in zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


class Counted(Recoverable):
    """Has counts and settings, and no model."""

    placement: Any = None
    settings, loader = ImageSettings(steps=8, lr=0.5), SimpleNamespace(steps=3, samples=5)  # type: ignore[assignment]


def test_counts_of_epochs_and_of_written_checkpoints() -> None:
    trainer = Counted()
    trainer.step_count, trainer.checkpoints_begun = 7, 2
    assert (trainer.epoch, trainer.steps, trainer.notes) == (2, 8, {})
    for saving, finished in ((None, 2), (SimpleNamespace(is_written=True), 2), (SimpleNamespace(is_written=False), 1)):
        trainer._saving = saving  # type: ignore[assignment]
        assert trainer.checkpoints_written == finished


@pytest.mark.parametrize(
    "values", [{}, {"settings": {}}, {"settings": 5, "position": {"samples": 5}}, {"settings": {}, "position": 3}]
)
def test_checkpoints_without_settings_or_position_are_refused(values: dict[str, Any]) -> None:
    saved: Any = SimpleNamespace(step=4, values=values)
    with pytest.raises(CheckpointError, match=r"^checkpoint of step 4: not written by distconv train, since"):
        Counted()._check_settings(saved)
    saved.values = {"settings": {"lr": 0.25, "epochs": 9}, "position": {"samples": 6}}
    text = "settings: lr was 0.25 and is 0.5; training samples was 6 and is 5$"
    with pytest.raises(CheckpointError, match=f"^checkpoint of step 4: written with different {text}"):
        Counted()._check_settings(saved)


@pytest.mark.fault(58)
@on_ranks
def test_steps_go_on_when_one_rank_finds_the_disk_full_beside_them(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, saved = written(comm, shared_tmp_path), str(shared_tmp_path / "saved")
    trainer = trainer_on(comm, folder)
    batches = trainer.batches()
    trainer.step(*next(batches).tensors)
    trainer.save(saved)
    first = checkpoint.newest(saved, comm)
    comm.Barrier()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        if comm.rank == 0:
            patched.setattr(os, "write", full)
        trainer.start_saving(saved)
        trainer.step(*next(batches).tensors)
        text = refused(comm, trainer.finish_saving)
    assert "step-000001 could not be written: [Errno 28] No space left on device" in text
    assert checkpoint.newest(saved, comm) == first
    trainer.step(*next(batches).tensors)
    trainer.save(saved)
    assert checkpoint.newest(saved, comm) == Path(saved) / "step-000003"


@pytest.mark.ranks(1, 2)
def test_a_run_goes_on_with_each_setting_as_it_was_but_its_length(comm: Any, shared_tmp_path: Path) -> None:
    trainer, saved = trainer_on(comm, written(comm, shared_tmp_path)), str(shared_tmp_path / "saved")
    trainer.save(saved)
    settings, others = trainer.settings, {int: 7, float: 0.375, str: "other", bool: True, type(None): 7, dict: {"a": 1}}
    for field in dataclasses.fields(ImageSettings):
        value = getattr(settings, field.name)
        other = others[type(value)]
        trainer.settings = dataclasses.replace(settings, **{field.name: other})
        if field.name in ("epochs", "steps", "shard_optimizer", "shard_weights"):
            assert trainer.resume(saved)
        else:
            text = refused(comm, lambda: trainer.resume(saved))
            assert f"written with different settings: {field.name} was {value!r} and is {other!r}" in text
    trainer.settings, trainer.step_count = settings, 9
    trainer.save(saved)
    text = refused(comm, lambda: trainer.resume(saved))
    assert "checkpoint of step 9: later than the 8 steps" in text


@pytest.mark.long
@pytest.mark.ranks(2)
def test_averaged_weights_are_held_resumed_and_evaluated(comm: Any, shared_tmp_path: Path) -> None:
    settings = ImageSettings("resnet20", width=4, batch=8, steps=4, lr=0.01, dtype="float64", ema=0.75)
    samples, saved = ImageSamples(written(comm, shared_tmp_path, write_cifar), comm), str(shared_tmp_path / "saved")
    grid = dc.ProcessGrid(comm, c=2)
    first, losses = ImageTrainer(settings, samples, grid), []
    averages: dict[str, torch.Tensor] = {}
    for batch in first.batches():
        losses.append(first.step(*batch.tensors))
        for name, weight in first.model.state_dict().items():
            floats = weight.is_floating_point() and "running" not in name
            now = torch.as_tensor(weight).clone()
            averages[name] = 0.75 * averages[name] + 0.25 * now if floats and name in averages else now
        if first.step_count == 2:
            first.save(saved)
    assert first.average is not None
    for name, weight in first.average.module.state_dict().items():
        assert (weight - averages[name]).abs().max() < 1e-12, name
    second = ImageTrainer(settings, samples, grid)
    assert second.resume(saved)
    assert [second.step(*batch.tensors) for batch in second.batches()] == losses[2:]
    pairs = zip(
        second.evaluation_model.state_dict().values(), first.evaluation_model.state_dict().values(), strict=True
    )
    assert all(torch.equal(one, other) for one, other in pairs)
    plain = ImageTrainer(dataclasses.replace(settings, ema=None), samples, grid)
    plain.model.load_state_dict(averages)
    expected = plain.evaluate("test")
    found = first.evaluate("test")
    assert (found.correct, found.loss) == (expected.correct, pytest.approx(expected.loss, rel=1e-10))
    assert found.loss != pytest.approx(_without_average(first).evaluate("test").loss, rel=1e-3)


def _without_average(trainer: ImageTrainer) -> ImageTrainer:
    trainer.average = None
    return trainer
