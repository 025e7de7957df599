"""``distconv bench pointcloud``: equal steps of both networks, the printed text, and what is too large."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest
import torch

import distconv as dc
from distconv.errors import DistconvError
from distconv.jobs.bench.child_processes import Peak
from distconv.jobs.bench.layers import pointcloud
from distconv.jobs.pointcloud.batches import VoxelBatch
from distconv.layers.models.sparse import dense_resnet, sparse_resnet
from tests.jobs.bench import command
from tests.jobs.command_lines import assert_refused

printing = command.printing

OPTIONS = argparse.Namespace(model="resnet", width=2, batch=2)
SMALL = ["bench", "pointcloud", "--model", "resnet", "--width", "2", "--batch", "2", "--rounds", "1"]


def doubled(batch: VoxelBatch) -> VoxelBatch:
    return replace(batch, features=batch.features.double())


def in_double(network: Any) -> Any:
    return lambda width: network(width=width).double()


def test_point_dropout_leaves_fewer_voxels() -> None:
    sizes = [len(pointcloud.make_batch(OPTIONS, 16, keep).coords) for keep in (1.0, 0.5, 0.25)]
    assert sizes[0] > sizes[1] > sizes[2] > sizes[0] / 4


def test_a_step_of_each_variant_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (pointcloud.DENSE, "S-0.5"):
        step = pointcloud.make_step(OPTIONS, 8, name)
        losses = [float(step()) for _ in range(6)]
        assert losses[-1] < losses[0]


def test_a_run_that_dies_of_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def instead(words: list[str]) -> Peak:
        raise DistconvError("the process that runs one rank failed (exit code 1): no module")

    monkeypatch.setattr(pointcloud, "run_in_new_process", instead)
    assert_refused(capsys, [*SMALL, "--resolution", "8"], "failed (exit code 1): no module")


def test_the_cap_ends_a_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(pointcloud, "measure_first_step", full)
    monkeypatch.setattr(pointcloud.resource, "setrlimit", lambda *_: None)
    words = [*SMALL, "--resolution", "8", "--alone", "D-1"]
    assert_refused(capsys, words, "out of memory: [enforce fail]")


@pytest.mark.ranks(2)
def test_steps_over_ranks_that_share_the_clouds_are_those_of_one(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # In float32 batch norm of so few sites makes digits of rounding errors within a step.
    in_float32 = pointcloud.make_batch
    monkeypatch.setattr(pointcloud, "make_batch", lambda *of: doubled(in_float32(*of)))
    monkeypatch.setattr(pointcloud, "NETWORKS", {"resnet": (in_double(sparse_resnet), in_double(dense_resnet))})
    with dc.ProcessGrid(comm, n=2) as grid:
        for name in (pointcloud.DENSE, "S-0.5"):
            one, shared = pointcloud.make_step(OPTIONS, 8, name), pointcloud.make_step(OPTIONS, 8, name, grid)
            for _ in range(3):
                assert float(shared()) == pytest.approx(float(one()), rel=1e-10)


@pytest.mark.ranks(3)
def test_more_ranks_than_clouds_are_refused(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, SMALL, "--batch 2: fewer clouds than ranks (3)")


def test_the_printed_text_is_as_approved(printing: command.Printing, monkeypatch: pytest.MonkeyPatch) -> None:
    def instead(words: list[str]) -> Peak:
        printing.seen.append(" ".join(words))
        if "S-0.25" in words:
            raise DistconvError("out of memory: no")
        return Peak(1 << 20, (1 + len(printing.seen)) << 22, 0.0)

    monkeypatch.setattr(pointcloud, "run_in_new_process", instead)
    words = ["--resolution", "8", "9", "--keep", "1", "0.25", "--cap", "2", "--rounds", "3"]
    printing.approve(
        "pointcloud", pointcloud, "pointcloud", "--model", "resnet", "--width", "2", "--batch", "2", *words
    )


def test_the_memory_of_a_process_is_limited_to_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    monkeypatch.setattr(pointcloud.resource, "setrlimit", lambda *given: limits.append(given))
    monkeypatch.setattr(pointcloud, "measure_first_step", lambda make: make())
    monkeypatch.setattr(pointcloud, "make_step", lambda options, *given: given)
    assert pointcloud._measured_here(argparse.Namespace(cap=3, resolution=[7, 9], alone="S-1")) == (7, "S-1")
    assert limits == [(pointcloud.resource.RLIMIT_DATA, (3 << 30, 3 << 30))]
    monkeypatch.setattr(pointcloud, "measure_first_step", lambda make: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pointcloud._measured_here(argparse.Namespace(cap=3, resolution=[7], alone="S-1"))
    random = torch.get_rng_state()
    pointcloud._preserve_random_state(lambda: torch.rand(3))()
    assert torch.equal(torch.get_rng_state(), random)
