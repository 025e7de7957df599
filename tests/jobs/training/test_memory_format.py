"""The memory format of a training: the same steps in both, the faster one chosen, and kept by a resumed run."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import distconv as dc
from distconv.jobs.images.classification import ImageSettings, ImageTrainer
from distconv.jobs.images.samples import ImageSamples
from distconv.jobs.training import memory_format as memory_format_module
from distconv.jobs.training.memory_format import make_in_memory_format
from tests.jobs.images.image_files import write_cifar, written

SETTINGS = ImageSettings("resnet20", 4, batch=9, steps=4, lr=0.02, dtype="float64", augment="crop,flip")


@pytest.fixture
def samples(comm: Any, shared_tmp_path: Path) -> ImageSamples:
    return ImageSamples(written(comm, shared_tmp_path, write_cifar), comm)


def trainer_of(samples: ImageSamples, settings: ImageSettings) -> ImageTrainer:
    return ImageTrainer(settings, samples, dc.ProcessGrid(samples.comm, h=samples.comm.size))


def options(out: Path, choice: str, resume: str | None = None) -> Namespace:
    return Namespace(memory_format=choice, resume=resume, out=out)


def is_channels_last(block: torch.Tensor) -> bool:
    return block.is_contiguous(memory_format=torch.channels_last) and not block.is_contiguous()


@pytest.mark.ranks(2)
def test_both_formats_take_the_same_steps(comm: Any, samples: ImageSamples) -> None:
    losses = {}
    for name in memory_format_module.FORMATS:
        trainer = trainer_of(samples, replace(SETTINGS, memory_format=name))
        wanted = name == "channels_last"
        filters = next(weight for weight in trainer.model.parameters() if weight.dim() == 4)
        assert is_channels_last(filters.detach()) is wanted
        losses[name] = []
        for batch in trainer.batches():
            assert is_channels_last(batch.tensors[0].local) is wanted
            losses[name].append(trainer.step(*batch.tensors))
        (batch,) = list(trainer.batches_of("test").epoch(0))[:1]
        assert is_channels_last(batch.tensors[0].local) is wanted
    assert losses["channels_last"] == pytest.approx(losses["contiguous"], rel=1e-9)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("faster", memory_format_module.FORMATS)
def test_the_faster_format_of_the_slowest_rank_is_taken(
    comm: Any,
    samples: ImageSamples,
    faster: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made, times = [], iter(range(100))

    def make(settings: ImageSettings) -> ImageTrainer:
        made.append(settings.memory_format)
        return trainer_of(samples, settings)

    def now() -> float:
        # Both formats take 1 s a step on rank 0. On the last rank, one of them takes 3 s.
        slow = comm.rank == comm.size - 1 and made[-1] != faster
        return next(times) * (3.0 if slow else 1.0)

    monkeypatch.setattr(memory_format_module, "now", now)
    monkeypatch.setattr(memory_format_module, "_WORTHWHILE", SETTINGS.steps)
    trainer = make_in_memory_format(options(tmp_path, "auto"), SETTINGS, make, comm)
    assert made == ["contiguous", "channels_last", faster]
    assert trainer.settings == replace(SETTINGS, memory_format=faster) and trainer.step_count == 0
    contiguous, channels_last = (1000.0, 3000.0) if faster == "contiguous" else (3000.0, 1000.0)
    told = (
        f"memory format {faster}: a step takes {contiguous:.1f} ms with contiguous tensors and {channels_last:.1f} ms "
        "with channels_last ones\n"
    )
    assert capsys.readouterr().out == (told if comm.rank == 0 else "")
    # The measured steps leave no trace: not in the weights, the order of samples, nor the random numbers.
    found = [trainer.step(*batch.tensors) for batch in trainer.batches()]
    plain = trainer_of(samples, trainer.settings)
    assert found == [plain.step(*batch.tensors) for batch in plain.batches()]


@pytest.mark.ranks(1, 2)
def test_a_model_that_needs_contiguous_tensors_gets_them(
    comm: Any,
    samples: ImageSamples,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(memory_format_module, "_WORTHWHILE", SETTINGS.steps)

    def view_images(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        given[0].view(given[0].shape[0], -1)

    def make(settings: ImageSettings) -> ImageTrainer:
        trainer = trainer_of(samples, settings)
        trainer.model.register_forward_pre_hook(view_images)
        return trainer

    trainer = make_in_memory_format(options(tmp_path, "auto"), SETTINGS, make, comm)
    assert trainer.settings.memory_format == "contiguous"
    told = "memory format contiguous: with channels_last tensors the model raises "
    assert capsys.readouterr().out.startswith(told) == (comm.rank == 0)


@pytest.mark.ranks(1)
def test_short_runs_and_given_formats_are_not_measured(comm: Any, samples: ImageSamples, tmp_path: Path) -> None:
    made = []

    def make(settings: ImageSettings) -> ImageTrainer:
        made.append((settings.steps, settings.memory_format))
        return trainer_of(samples, settings)

    make_in_memory_format(options(tmp_path, "auto"), replace(SETTINGS, steps=99), make, comm)
    make_in_memory_format(options(tmp_path, "contiguous"), replace(SETTINGS, steps=100), make, comm)
    make_in_memory_format(options(tmp_path, "channels_last"), replace(SETTINGS, steps=100), make, comm)
    make_in_memory_format(Namespace(resume=None, out=tmp_path), replace(SETTINGS, steps=100), make, comm)
    assert made == [(99, "contiguous"), (100, "contiguous"), (100, "channels_last"), (100, "contiguous")]


@pytest.mark.ranks(1, 2)
def test_a_resumed_run_keeps_its_format(
    comm: Any, samples: ImageSamples, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_format_module, "_WORTHWHILE", 1)
    monkeypatch.setattr(memory_format_module, "_seconds_per_step", lambda training: pytest.fail("measured"))
    trainer = trainer_of(samples, replace(SETTINGS, memory_format="channels_last"))
    folder = shared_tmp_path / "run"
    trainer.save(str(folder / "checkpoints"))
    trainer.step_count = 1
    trainer.save(str(folder / "checkpoints"))

    def resumed() -> str:
        make = lambda settings: trainer_of(samples, settings)  # noqa: E731
        return make_in_memory_format(options(folder, "auto", "whole"), SETTINGS, make, comm).settings.memory_format

    assert resumed() == "channels_last"
    # The newest checkpoint is damaged, so the one before it counts.
    if comm.rank == 0:
        (manifest,) = (folder / "checkpoints").glob("*1/manifest.json")
        manifest.write_text(manifest.read_text().replace("channels_last", "channels_lost"))
    comm.Barrier()
    assert resumed() == "channels_last"


def test_a_run_without_checkpoints_is_contiguous(tmp_path: Path) -> None:
    assert memory_format_module._format_of_checkpoint(tmp_path / "nowhere") == "contiguous"
