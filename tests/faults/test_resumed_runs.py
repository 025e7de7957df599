"""Trainings that go on from a checkpoint with other ranks and grids: the same weights, then the same steps."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv import checkpoint
from distconv.jobs.images.classification import ImageSettings, ImageTrainer
from distconv.jobs.images.samples import ImageSamples
from tests.jobs.images.image_files import written

SETTINGS = ImageSettings("lenet5", batch=16, steps=24, lr=0.05, dtype="float64", augment="crop")
SAVED_AT = 4


def run(
    comm: Any, data: Path, grid: str, saved: Path, *, resume: bool, settings: ImageSettings = SETTINGS
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses from ``SAVED_AT`` on, and the weights that they begin with; saves there, or resumes from there."""
    trainer = ImageTrainer(settings, ImageSamples(data, comm), dc.ProcessGrid(comm, **dc.parse_grid(grid)))
    assert not resume or trainer.resume(str(saved))
    weights, losses = _state(trainer), []
    for batch in trainer.batches():
        losses.append(trainer.step(*batch.tensors))
        if trainer.step_count == SAVED_AT:
            weights = _state(trainer)
            trainer.save(str(saved))
    return losses[-(SETTINGS.steps - SAVED_AT) :], weights  # type: ignore[operator]


def _state(trainer: ImageTrainer) -> dict[str, torch.Tensor]:
    return {name: dc.gather(tensor).clone() for name, tensor in trainer.model.state_dict().items()}


@pytest.mark.long
@pytest.mark.fault(44, 67)
@pytest.mark.ranks(4)
@pytest.mark.time_limit(300)
@pytest.mark.parametrize(("dtype", "within"), [("float64", 1e-10), ("float32", 1e-5)])
def test_other_ranks_and_grids_go_on_from_a_checkpoint(
    comm: Any, shared_tmp_path: Path, dtype: str, within: float
) -> None:
    saved_on = "h=2,w=2"
    data, settings = written(comm, shared_tmp_path), replace(SETTINGS, dtype=dtype)
    losses, weights = run(comm, data, saved_on, data / "saved", resume=False, settings=settings)
    for size, grid in ((1, "n=1"), (2, "h=2"), (3, "n=3"), (4, "h=4")):
        part = _part(comm, size)
        if part:
            found, loaded = run(part, data, grid, data / "saved", resume=True, settings=settings)
            assert found == pytest.approx(losses, rel=within), (saved_on, grid)
            assert all(torch.equal(loaded[name], weight) for name, weight in weights.items()), (saved_on, grid)
        _meet(comm)


def _part(comm: Any, size: int) -> Any:
    """The first ``size`` ranks; nothing on the others."""
    part = comm.Split(0 if comm.rank < size else MPI.UNDEFINED, comm.rank)
    return None if part == MPI.COMM_NULL else part


def _meet(comm: Any) -> None:
    """Wait for all ranks without taking a core from those that work, as a barrier does."""
    arrived = comm.Ibarrier()
    while not arrived.Test():
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.fault(43)
@pytest.mark.ranks(2, 4)
@pytest.mark.time_limit(180)
def test_the_same_run_twice_has_the_same_bits(comm: Any, shared_tmp_path: Path) -> None:
    data = written(comm, shared_tmp_path)
    for grid in ("n=2", "h=2") if comm.size == 2 else ("h=2,w=2", "n=2,c=2"):
        once, again = (run(comm, data, grid, data / f"saved{i}", resume=False) for i in range(2))
        assert once[0] == again[0]
        assert all(torch.equal(again[1][name], weight) for name, weight in once[1].items())


@pytest.mark.fault(69)
@pytest.mark.gpu
@pytest.mark.ranks(1, 2, 4)
def test_weights_of_a_gpu_go_to_the_cpu_and_back_bit_by_bit(comm: Any, shared_tmp_path: Path) -> None:
    def made(device: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3)).to(device)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = made("cuda", 0)
    model(torch.ones(2, 2, 5, 5, device="cuda")).square().mean().backward()
    optimizer.step()
    for step, device in enumerate(("cpu", "cuda")):
        saved = checkpoint.capture_state(model, optimizer, comm)
        found = checkpoint.load(checkpoint.save(shared_tmp_path, step, *saved, comm), comm)
        before, (model, optimizer) = model.state_dict(), made(device, 1)
        checkpoint.restore_state(found, model, optimizer, comm)
        assert all(torch.equal(model.state_dict()[name].cpu(), value.cpu()) for name, value in before.items())
