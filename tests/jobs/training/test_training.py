"""What all training jobs share: the learning rate, and checkpoints that are written beside the steps."""

from __future__ import annotations

import errno
import itertools
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import distconv as dc
from distconv import checkpoint
from distconv.jobs.images.classification import Settings, Trainer
from distconv.jobs.images.samples import ImageSamples
from distconv.jobs.training.training import FREE, learning_rate, make_optimizer
from tests.distconv.checkpoint.damage import refused
from tests.jobs.images.grids import grid_of
from tests.jobs.images.image_files import written

on_ranks = pytest.mark.ranks(1, 2, 4)


def trainer_on(comm: Any, folder: Path, optimizer: str = "sgd") -> Trainer:
    settings = Settings("lenet5", batch=16, steps=8, optimizer=optimizer, lr=0.01, dtype="float64", augment="crop")
    return Trainer(settings, ImageSamples(folder, comm), grid_of(comm))


@pytest.mark.fault(66)
@on_ranks
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_what_is_saved_beside_the_steps_is_as_it_was_before_them(
    comm: Any, shared_tmp_path: Path, optimizer: str
) -> None:
    folder, saved = written(comm, shared_tmp_path), str(shared_tmp_path / "saved")
    first, losses = trainer_on(comm, folder, optimizer), []
    for batch in first.batches():
        losses.append(first.step(*batch.tensors))
        if first.step_count == 3:
            first.start_saving(saved)
            assert checkpoint.newest(saved, comm) is None
        if first.step_count == 6:
            first.finish_saving()
            assert first.checkpoints_written == first.checkpoints_begun == 1
    second = trainer_on(comm, folder, optimizer)
    assert second.resume(saved)
    assert [second.step(*batch.tensors) for batch in second.batches()] == losses[3:]
    for one, other in zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@on_ranks
def test_a_checkpoint_of_a_users_own_loop_is_refused_by_a_training(comm: Any, shared_tmp_path: Path) -> None:
    trainer = trainer_on(comm, written(comm, shared_tmp_path))
    saved = shared_tmp_path / "saved"
    dc.save_checkpoint(saved, 1, trainer.model, trainer.optimizer, comm=comm)
    for fallback in (False, True):
        text = refused(comm, lambda fallback=fallback: trainer.resume(str(saved), fallback=fallback))
        assert "checkpoint of step 1 is none of distconv train: it has no settings and position" in text


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


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    rates = [learning_rate(step, 100, 2.0) for step in range(101)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == max(rates) == 2.0
    assert rates[100] == pytest.approx(0.0)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sgd", lambda weights: torch.optim.SGD(weights, 0.02, momentum=0.8, weight_decay=0.3)),
        ("adam", lambda weights: torch.optim.Adam(weights, 0.02, weight_decay=0.3)),
        ("adamw", lambda weights: torch.optim.AdamW(weights, 0.02, weight_decay=0.3)),
    ],
)
def test_an_optimizer_takes_the_steps_of_torchs_own(name: str, expected: Any) -> None:
    settings = Settings(optimizer=name, lr=0.02, momentum=0.8, weight_decay=0.3)
    weights = [torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64)) for _ in range(2)]
    for weight, optimizer in zip(weights, (make_optimizer(settings, weights[:1]), expected(weights[1:])), strict=True):
        for step in range(3):
            optimizer.zero_grad()
            (weight * torch.tensor([0.5 + step, -1.0])).sum().backward()
            optimizer.step()
    assert torch.equal(*weights)


OTHER = {
    "model": "alexnet",
    "width": 3,
    "batch": 8,
    "optimizer": "adam",
    "lr": 0.02,
    "warm_up": 0.2,
    "momentum": 0.5,
    "weight_decay": 0.25,
    "dtype": "float32",
    "precision": "bf16",
    "batch_norm": "local",
    "seed": 1,
    "drop_last": True,
    "augment": "none",
}


def test_a_resumed_run_refuses_each_setting_that_numbers_depend_on(comm: Any, shared_tmp_path: Path) -> None:
    trainer, saved = trainer_on(comm, written(comm, shared_tmp_path)), str(shared_tmp_path / "saved")
    trainer.save(saved)
    settings = trainer.settings
    assert set(OTHER) | set(FREE) == {field.name for field in fields(settings)}
    for name, value in OTHER.items():
        trainer.settings = replace(settings, **{name: value})
        text = refused(comm, lambda: trainer.resume(saved))
        assert f"{name} was {getattr(settings, name)!r} and is {value!r}" in text
    trainer.settings = replace(settings, epochs=7, steps=9, shard_optimizer=True)
    assert trainer.resume(saved)
