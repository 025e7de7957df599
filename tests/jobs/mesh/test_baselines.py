"""Baseline scores do not depend on the grid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest
from mpi4py import MPI

import distconv as dc
from distconv.jobs.mesh import baselines
from distconv.jobs.mesh.recipe import CHANNELS
from distconv.jobs.mesh.samples import MeshSamples
from distconv.jobs.mesh.scores import score_predictor
from distconv.jobs.mesh.segmentation import MeshTrainer
from distconv.jobs.mesh.synthetic_samples import write_synthetic
from tests.jobs.mesh.mesh_files import GRIDS, SMALL, written


@pytest.mark.ranks(4)
def test_scores_do_not_depend_on_the_grid(comm: Any, shared_tmp_path: Path) -> None:
    path = written(shared_tmp_path / "mesh.h5", comm)
    found = []
    for ranks, axes in ((comm, GRIDS[comm.size]), (MPI.COMM_SELF, {})):
        samples = MeshSamples(path, ranks, extrapolated=True)
        trainer = MeshTrainer(SMALL, samples, dc.ProcessGrid(ranks, **axes))
        verdicts = [*baselines.constant_answers(samples), baselines.best_channel(samples)]
        verdicts += baselines.extrapolation(samples, 0.4)
        verdicts.append(score_predictor("unet", trainer.scores("train"), trainer.scores("heldout")))
        found.append(verdicts)
        samples.close()
    assert found[0] == found[1]


def test_scores_are_those_of_brute_force(tmp_path: Path) -> None:
    """On samples whose vorticity is the label, and whose cells invert where their extrapolated Jacobian is small."""
    write_synthetic(tmp_path / "x.h5", (16, 24), train=3, heldout=2)
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        for group in ("train", "heldout"):
            file[f"{group}/input"][:, CHANNELS.index("vorticity")] = file[f"{group}/label"][()]
        label, jacobian = file["heldout/label"][()] > 0, file["heldout/extrapolated"][()]
    samples = MeshSamples(tmp_path / "x.h5", MPI.COMM_SELF, extrapolated=True)
    never, always = baselines.constant_answers(samples)
    assert (never.heldout, always.heldout) == (0, pytest.approx(2 * label.sum() / (label.size + label.sum())))
    best = baselines.best_channel(samples)
    assert (best.name, best.training, best.heldout) == ("channel 'vorticity'", 1.0, 1.0)
    fitted, named = baselines.extrapolation(samples, 0.25)
    called = jacobian < 0.25
    assert named.heldout == pytest.approx(2 * (called & label).sum() / (called.sum() + label.sum()))
    assert named.heldout > 0.5 and named.threshold == "< 0.25"
    assert fitted.training >= named.training and fitted.threshold.startswith("<")
    samples.close()


def test_the_perceptron_is_trained_for_all_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_synthetic(tmp_path / "x.h5", (16, 24), train=4, heldout=2)
    samples, losses = MeshSamples(tmp_path / "x.h5", MPI.COMM_SELF), []
    step = MeshTrainer.step
    monkeypatch.setattr(MeshTrainer, "step", lambda *given: losses.append(step(*given)) or losses[-1])
    settings = replace(SMALL, batch=2, steps=3)
    assert baselines.perceptron(samples, dc.ProcessGrid(MPI.COMM_SELF), settings).name == "perceptron on one cell"
    assert len(losses) == 3
    samples.close()
