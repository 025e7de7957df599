"""``distconv train mesh``: what it writes, how it resumes, what it refuses; and how predictors are judged."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv import cli
from distconv.errors import DataError, DistconvError
from distconv.jobs.commands import train_mesh
from distconv.jobs.mesh import baselines
from distconv.jobs.mesh.dataset import CHANNELS, flip
from distconv.jobs.mesh.samples import MeshSamples, signs
from distconv.jobs.mesh.scores import Histogram, Threshold, Verdict, judge, table
from distconv.jobs.mesh.segmentation import Settings, Trainer
from distconv.jobs.mesh.synthetic_samples import write_synthetic
from distconv.jobs.training.training import learning_rate
from tests.distconv.data.sample_files import common, flip_bit

GRIDS = {1: {"n": 1}, 2: {"h": 2}, 4: {"n": 2, "w": 2}}
on_ranks = pytest.mark.ranks(*GRIDS)
SMALL = Settings("unet", 2, batch=4, epochs=3, dtype="float64")


def written(path: Path, comm: Any, **options: Any) -> Path:
    if comm.rank == 0:
        write_synthetic(path, (32, 32), train=6, **{"heldout": 3, **options})
    comm.Barrier()
    return path


def command(path: Path, out: Path, comm: Any, *more: str) -> list[str]:
    grid = ",".join(f"{axis}={parts}" for axis, parts in GRIDS[comm.size].items())
    base = ["train", "mesh", "--data", str(path), "--out", str(out), "--width", "2", "--epochs", "2", "--grid", grid]
    return [*base, *more]


@on_ranks
def test_it_writes_metrics_a_summary_checkpoints_and_a_picture(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "PIXEL_STEPS", 3)
    path, out = written(shared_tmp_path / "mesh.h5", comm), shared_tmp_path / "out"
    assert cli.main(command(path, out, comm, "--baselines", "--checkpoint-every", "3")) == 0
    comm.Barrier()
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert set(lines[0]) == {"step", "epoch", "loss", "lr", "seconds", "samples_per_s"}
    assert [line.get("epoch") for line in lines] == [0, 0, 1, 1, None]
    assert set(lines[-1]["families"]) == {"blast", "shear"}
    summary = json.loads((out / "summary.json").read_text())
    names = [verdict["name"] for verdict in summary["f1"]]
    assert names[:2] == ["all negative", "all positive"]
    assert names[2].startswith("channel ")
    assert names[3:] == ["frozen velocities, fitted", "frozen velocities, at q*", "perceptron on one cell", "unet"]
    assert len(summary["peak_memory_bytes"]) == comm.size
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-000003", "step-000004"]
    assert (out / "result.png").read_bytes()[:4] == b"\x89PNG"
    if comm.rank == 0:
        assert "positive cells: 8.0 % of the training samples" in printed
        assert "frozen velocities, at q*" in printed
        assert f"picture: {out / 'result.png'}" in printed
    else:
        assert printed == ""


@on_ranks
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_resumed_run_takes_the_same_steps_bit_for_bit(comm: Any, shared_tmp_path: Path, optimizer: str) -> None:
    path = written(shared_tmp_path / "mesh.h5", comm)
    settings = Settings("unet", 2, batch=4, epochs=5, dtype="float64", optimizer=optimizer)
    samples, grid = MeshSamples(path, comm), dc.ProcessGrid(comm, **GRIDS[comm.size])
    first = Trainer(settings, samples, grid)
    losses = []
    for batch in first.batches():
        losses.append((batch.samples, first.step(*batch.tensors)))
        if first.step_count == 3:  # in the middle of the second epoch
            first.save(str(shared_tmp_path / "saved"))
    second = Trainer(settings, samples, grid)
    assert second.resume(str(shared_tmp_path / "saved"))
    assert (second.step_count, second.epoch) == (3, 1)
    assert [(batch.samples, second.step(*batch.tensors)) for batch in second.batches()] == losses[3:]
    for (name, expected), found in zip(
        first.model.state_dict().items(), second.model.state_dict().values(), strict=True
    ):
        assert torch.equal(found, expected), name
    samples.close()


PLANS = {
    1: {"*": {"n": 1}},
    2: {"*": {"h": 2}, "down.1.*": {"n": 2}, "predict": {"w": 2}},
    4: {"*": {"h": 2, "w": 2}, "down.1.*": {"n": 2, "c": 2}, "up.*": {"n": 2, "h": 2}, "predict": {"w": 2}},
}


@on_ranks
def test_a_plan_takes_the_same_steps_as_a_grid_and_scores_alike(comm: Any, shared_tmp_path: Path) -> None:
    samples = MeshSamples(written(shared_tmp_path / "mesh.h5", comm), comm)
    found = []
    for place in (dc.ProcessGrid(comm, **GRIDS[comm.size]), dc.Plan(PLANS[comm.size])):
        trainer = Trainer(SMALL, samples, place)
        losses = [trainer.step(*batch.tensors) for batch in trainer.batches()]
        found.append((losses, trainer.scores("heldout").counts))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-9)
    assert np.array_equal(found[1][1], found[0][1])
    samples.close()


@on_ranks
def test_resume_needs_a_checkpoint_of_the_same_settings(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = written(shared_tmp_path / "mesh.h5", comm), shared_tmp_path / "out"
    assert cli.main(command(path, out, comm, "--resume")) == 2
    assert cli.main(command(path, out, comm)) == 0
    assert cli.main(command(path, out, comm, "--resume", "--lr", "0.5")) == 2
    assert cli.main(command(path, out, comm, "--resume")) == 0
    errors = capsys.readouterr().err
    assert ("there is no finished checkpoint in" in errors) == (comm.rank == 0)
    assert ("was made with other settings: lr was 0.005 and is 0.5" in errors) == (comm.rank == 0)


@on_ranks
def test_a_new_run_puts_older_checkpoints_aside(comm: Any, shared_tmp_path: Path) -> None:
    path, out = written(shared_tmp_path / "mesh.h5", comm), shared_tmp_path / "out"
    for _ in range(2):
        assert cli.main(command(path, out, comm, "--steps", "1")) == 0
    comm.Barrier()
    assert (out / "checkpoints.1" / "step-000001").is_dir()
    assert (out / "checkpoints" / "step-000001").is_dir()


@on_ranks
def test_without_matplotlib_it_says_so(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(train_mesh, "draw", missing)
    path = written(shared_tmp_path / "mesh.h5", comm)
    assert cli.main(command(path, shared_tmp_path / "out", comm, "--steps", "1")) == 0
    text = "no picture: matplotlib is not installed; pip install 'distconv[plot]'"
    assert (text in capsys.readouterr().out) == (comm.rank == 0)


@on_ranks
def test_samples_without_held_out_ones_are_trained_on(comm: Any, shared_tmp_path: Path) -> None:
    path = written(shared_tmp_path / "mesh.h5", comm, heldout=0)
    assert cli.main(command(path, shared_tmp_path / "out", comm, "--steps", "1")) == 0
    comm.Barrier()
    assert json.loads((shared_tmp_path / "out" / "summary.json").read_text())["f1"] == []


def drop_label(file: h5py.File) -> None:
    del file["train/label"]


def large_label(file: h5py.File) -> None:
    file["train/label"][2, 3, 4] = 7


def nan_input(file: h5py.File) -> None:
    file["train/input"][3, 0, 0, 0] = np.nan


def other_size(file: h5py.File) -> None:
    for name, extra in (("input", (18,)), ("label", ())):
        kind = file[f"heldout/{name}"].dtype
        del file[f"heldout/{name}"]
        file[f"heldout/{name}"] = np.zeros((3, *extra, 16, 32), kind)


@on_ranks
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (drop_label, "there is no dataset 'train/label'"),
        (large_label, "'train/label' has values up to 7; labels are 0 or 1"),
        (nan_input, "'train/input' has NaN or infinite values in 1 samples, the first is 3"),
        (other_size, "dataset 'heldout/input' has samples of (16, 32), the training inputs are of (32, 32)"),
    ],
)
def test_bad_samples_are_refused_on_all_ranks(comm: Any, shared_tmp_path: Path, damage: Any, reason: str) -> None:
    path = written(shared_tmp_path / "mesh.h5", comm)
    if comm.rank == 0:
        with h5py.File(path, "r+") as file:
            damage(file)
    comm.Barrier()
    with pytest.raises(DataError) as caught:
        MeshSamples(path, comm)
    assert reason in common(comm, caught.value)


@on_ranks
def test_a_flipped_bit_ends_the_command_with_code_2(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(shared_tmp_path / "mesh.h5", comm)
    if comm.rank == 0:
        flip_bit(path, "train/input", 2)
    comm.Barrier()
    assert cli.main(command(path, shared_tmp_path / "out", comm)) == 2
    assert ("of dataset 'train/input':" in capsys.readouterr().err) == (comm.rank == 0)


@on_ranks
def test_a_loss_that_is_not_finite_stops_before_the_weights_change(comm: Any, shared_tmp_path: Path) -> None:
    samples = MeshSamples(written(shared_tmp_path / "mesh.h5", comm), comm)
    trainer = Trainer(SMALL, samples, dc.ProcessGrid(comm, **GRIDS[comm.size]))
    with torch.no_grad():
        trainer.model.predict.bias.fill_(torch.inf)
    before = {name: tensor.clone() for name, tensor in trainer.model.named_parameters()}
    with pytest.raises(DistconvError, match=r"step 1: the loss is (inf|nan); lower --lr"):
        trainer.step(*next(trainer.batches()).tensors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.named_parameters())
    assert not Path(shared_tmp_path / "saved").exists()


@on_ranks
def test_scores_do_not_depend_on_the_grid(comm: Any, shared_tmp_path: Path) -> None:
    path = written(shared_tmp_path / "mesh.h5", comm)
    found = []
    for ranks, axes in ((comm, GRIDS[comm.size]), (MPI.COMM_SELF, {})):
        samples = MeshSamples(path, ranks, extrapolated=True)
        trainer = Trainer(SMALL, samples, dc.ProcessGrid(ranks, **axes))
        verdicts = [*baselines.constant_answers(samples), baselines.best_channel(samples)]
        verdicts += baselines.extrapolation(samples, 0.4)
        verdicts.append(judge("unet", trainer.scores("train"), trainer.scores("heldout")))
        found.append(verdicts)
        samples.close()
    assert found[0] == found[1]


def test_signs_are_those_of_a_mirrored_sample() -> None:
    sample = np.random.default_rng(0).standard_normal((len(CHANNELS), 4, 5)).astype(np.float32)
    for axis, dim in (("h", -2), ("w", -1)):
        mirrored, _ = flip(sample, np.zeros((4, 5), np.uint8), axis)
        assert np.array_equal(mirrored, np.flip(sample, dim) * np.array(signs(axis), np.float32).reshape(-1, 1, 1))
        odd = {CHANNELS[i] for i, sign in enumerate(signs(axis)) if sign < 0}
        assert odd == {"velocity v" if axis == "h" else "velocity u", "vorticity", "skew"}


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    rates = [learning_rate(step, 100, 2.0) for step in range(101)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == max(rates) == 2.0
    assert rates[100] == pytest.approx(0.0)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


def test_f1_and_the_best_threshold_are_those_of_brute_force() -> None:
    random = np.random.default_rng(1)
    label = random.random(5000) < 0.1
    for sign in (1, -1):
        score = np.clip(0.5 + sign * 0.15 * label + 0.1 * random.standard_normal(5000), 0, 1)
        histogram = Histogram(0.0, 1.0, ["one"])
        histogram.add(score, label, "one")
        found = histogram.best_threshold(both_directions=True)
        assert found.above == (sign > 0)
        called = score >= found.value if found.above else score < found.value
        f1 = 2 * (called & label).sum() / (called.sum() + label.sum())
        assert histogram.f1(found) == pytest.approx(f1)
        assert all(histogram.f1(Threshold(edge, found.above, 0.0)) <= histogram.f1(found) for edge in range(4097))
        assert histogram.positive_fraction() == pytest.approx(label.mean())


def test_the_table_is_aligned() -> None:
    verdicts = [
        Verdict("a", ">= 0.5", 0.5, 0.25, {"shear": 1.0}),
        Verdict("longer", "< 10", 0.125, 0.5, {"shear": 0.0}),
    ]
    lines = table(verdicts).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["F1", "threshold", "training", "held-out", "shear"]
    assert lines[2].split() == ["longer", "<", "10", "0.125", "0.500", "0.000"]


def test_pictures_can_be_drawn_without_warnings(tmp_path: Path) -> None:
    from distconv.jobs.mesh.picture import Example, draw

    maps = np.random.default_rng(0).random((3, 8, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(
            tmp_path / "x.png",
            [Example("shear", *maps)],
            channel="skew",
            threshold=0.5,
            losses=[(1, 1.0), (2, 0.5)],
            title="title",
        )
        draw(tmp_path / "y.png", [], channel="skew", threshold=0.5, losses=[], title="nothing")
    assert (tmp_path / "x.png").stat().st_size > 1000
