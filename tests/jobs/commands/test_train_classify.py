"""``distconv train classify``: the same steps on every grid, what it writes, how it resumes, what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv import cli
from distconv.errors import DataError
from distconv.jobs.commands import train_classify
from distconv.jobs.images.classification import Score, Settings, Trainer
from distconv.jobs.images.samples import ImageSamples
from distconv.jobs.training.model_factory import ModelError, build_classifier
from tests.distconv.data.sample_files import common
from tests.jobs.images import image_files
from tests.jobs.images.image_files import arrays

GRIDS = {
    1: ["n=1"],
    2: ["n=2", "h=2"],
    3: ["h=3"],
    4: ["n=2,h=2", "h=2,w=2"],
    6: ["n=3,w=2"],
}
ONE_GRID = {1: "n=1", 2: "h=2", 4: "n=2,w=2"}
on_ranks = pytest.mark.ranks(*ONE_GRID)


def written(comm: Any, folder: Path, write: Callable[[Path], None] = image_files.write_mnist) -> Path:
    if comm.rank == 0:
        write(folder)
    comm.Barrier()
    return folder


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the command that are not about their picture do not draw it."""
    monkeypatch.setattr(train_classify, "draw", lambda *_: None)


def grid_of(comm: Any) -> dc.ProcessGrid:
    return dc.ProcessGrid(comm, **dc.parse_grid(ONE_GRID[comm.size]))


def command(comm: Any, data: Path, *more: str) -> list[str]:
    out = str(data / "out")
    return [
        "train",
        "classify",
        "--data",
        str(data),
        "--out",
        out,
        "--batch",
        "16",
        "--grid",
        ONE_GRID[comm.size],
        *more,
    ]


def lines_of(data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data / "out" / "metrics.jsonl").read_text().splitlines()]


def outcome(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.main(arguments)
    return code, capsys.readouterr().err


@pytest.mark.ranks(*GRIDS)
@pytest.mark.parametrize(
    ("settings", "write"),
    [
        (Settings("lenet5", batch=16, steps=6, lr=0.1, dtype="float64", augment="crop"), image_files.write_mnist),
        (
            Settings("resnet20", 4, batch=9, steps=4, lr=0.02, weight_decay=1e-3, dtype="float64", augment="crop,flip"),
            image_files.write_cifar,
        ),
    ],
    ids=["lenet5", "resnet20"],
)
def test_losses_on_any_grid_equal_those_of_plain_torch(
    comm: Any, shared_tmp_path: Path, settings: Settings, write: Any
) -> None:
    folder = written(comm, shared_tmp_path, write)
    alone = Trainer(settings, ImageSamples(folder, MPI.COMM_SELF), dc.ProcessGrid(MPI.COMM_SELF))
    # The reference sees ordinary tensors. All epochs end with a smaller batch.
    expected = [alone.step(*(tensor.local for tensor in batch.tensors)) for batch in alone.batches()]
    score = alone.evaluate("test")
    samples = ImageSamples(folder, comm)
    for text in GRIDS[comm.size]:
        trainer = Trainer(settings, samples, dc.ProcessGrid(comm, **dc.parse_grid(text)))
        losses = [trainer.step(*batch.tensors) for batch in trainer.batches()]
        assert losses == pytest.approx(expected, rel=1e-10), text
        found = trainer.evaluate("test")
        assert (found.samples, found.correct) == (score.samples, score.correct)
        assert found.loss == pytest.approx(score.loss, rel=1e-9)


PLANS = {
    1: {"*": {"n": 1}},
    2: {"*": {"h": 2}, "c3": {"c": 2}, "f6": {"n": 2}, "output": {"n": 1}},
    4: {"*": {"n": 2, "h": 2}, "c3": {"c": 2, "w": 2}, "c5": {"n": 4}, "f6": {"c": 2}, "output": {"n": 2}},
}


def planned(comm: Any, folder: Path) -> Path:
    written(comm, folder, lambda place: dc.Plan(PLANS[comm.size], comm.size).save(place / "plan.json"))
    return folder / "plan.json"


@on_ranks
def test_a_plan_takes_the_same_steps_and_any_grid_goes_on_from_its_checkpoint(comm: Any, shared_tmp_path: Path) -> None:
    samples = ImageSamples(written(comm, shared_tmp_path), comm)
    settings = Settings("lenet5", batch=16, steps=6, lr=0.1, dtype="float64", augment="crop")
    trainer = Trainer(settings, samples, grid_of(comm))
    expected = [trainer.step(*batch.tensors) for batch in trainer.batches()]
    first = Trainer(settings, samples, dc.Plan.load(planned(comm, shared_tmp_path), comm))
    losses = []
    for batch in first.batches():
        losses.append(first.step(*batch.tensors))
        if first.step_count == 4:
            first.save(str(shared_tmp_path / "saved"))
    assert losses == pytest.approx(expected, rel=1e-10)
    assert first.evaluate("test").correct == trainer.evaluate("test").correct
    second = Trainer(settings, samples, grid_of(comm))
    assert second.resume(str(shared_tmp_path / "saved"))
    assert [second.step(*batch.tensors) for batch in second.batches()] == pytest.approx(expected[4:], rel=1e-10)


@pytest.mark.usefixtures("no_picture")
@on_ranks
def test_the_command_follows_a_plan(comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = written(comm, shared_tmp_path)
    plan = ["--plan", str(planned(comm, data))]
    arguments = [word for word in command(comm, data, "--steps", "2") if word not in ("--grid", ONE_GRID[comm.size])]
    assert cli.main([*arguments, *plan]) == 0
    comm.Barrier()
    summary = json.loads((data / "out" / "summary.json").read_text())
    assert summary["plan"] == PLANS[comm.size]
    text = f"2 steps, a plan of {len(PLANS[comm.size])} patterns, samples on grid "
    assert (text in capsys.readouterr().out) == (comm.rank == 0)


@on_ranks
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_resumed_run_takes_the_same_steps_bit_for_bit(comm: Any, shared_tmp_path: Path, optimizer: str) -> None:
    folder = written(comm, shared_tmp_path, image_files.write_cifar)
    settings = Settings("vgg11_bn", 2, batch=9, epochs=2, optimizer=optimizer, lr=0.01, augment="crop,flip")
    samples = ImageSamples(folder, comm)
    first = Trainer(settings, samples, grid_of(comm))
    losses = []
    for batch in first.batches():
        losses.append((batch.samples, first.step(*batch.tensors)))
        if first.step_count == 4:  # in the middle of the second epoch
            first.save(str(folder / "saved"))
            first.evaluate("test")
    second = Trainer(settings, samples, grid_of(comm))
    torch.rand(3)  # dropout must go on with the random numbers of the checkpoint
    assert second.resume(str(folder / "saved"))
    assert [(batch.samples, second.step(*batch.tensors)) for batch in second.batches()] == losses[4:]
    for (name, expected), found in zip(
        first.model.state_dict().items(), second.model.state_dict().values(), strict=True
    ):
        assert torch.equal(found, expected), name


@on_ranks
def test_every_sample_counts_once(comm: Any, shared_tmp_path: Path) -> None:
    """Batches that do not divide, ranks without a sample, replicas."""
    folder = written(comm, shared_tmp_path)
    samples = ImageSamples(folder, comm)
    scores = []
    for text in (ONE_GRID[comm.size], f"n={comm.size}", f"r={comm.size}", f"d={comm.size}"):
        trainer = Trainer(Settings(batch=8), samples, dc.ProcessGrid(comm, **dc.parse_grid(text)))
        scores.append(trainer.evaluate("test"))
    assert {score.samples for score in scores} == {21}
    assert len({score.correct for score in scores}) == 1
    logits = torch.cat([logits for _, logits in trainer.predictions("test")])
    labels = torch.from_numpy(arrays(21, (1, 28, 28))[1]).long()
    assert scores[0].correct == int((logits.argmax(1) == labels).sum())
    assert scores[0].loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)


@on_ranks
def test_it_writes_metrics_a_summary_checkpoints_and_a_picture(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(comm, shared_tmp_path)
    assert cli.main(command(comm, data, "--epochs", "2", "--checkpoint-every", "2")) == 0
    comm.Barrier()
    lines = lines_of(data)
    assert [(line["step"], line.get("evaluation")) for line in lines] == [
        *((step, None) for step in (1, 2, 3)),
        (3, "test"),
        *((step, None) for step in (4, 5, 6)),
        (6, "train"),
        (6, "test"),
    ]
    assert set(lines[0]) == {"step", "epoch", "loss", "lr", "seconds", "samples_per_s"}
    summary = json.loads((data / "out" / "summary.json").read_text())
    assert summary["test_accuracy"] == lines[-1]["accuracy"] == lines[-1]["correct"] / 21
    assert summary["train_accuracy"] == lines[-2]["correct"] / 40
    assert summary["final_loss"] == lines[-3]["loss"]
    assert summary["settings"]["model"] == "lenet5"
    assert sorted(p.name for p in (data / "out" / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    assert (data / "out" / "result.png").read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    shown = f"test accuracy: {100 * lines[-1]['accuracy']:.2f} % ({lines[-1]['correct']} of 21)"
    assert (shown in printed) == (comm.rank == 0)
    assert ("on 40 samples of 1 x 28 x 28, batch 16, 6 steps" in printed) == (comm.rank == 0)


@pytest.mark.usefixtures("no_picture")
@on_ranks
def test_resume_keeps_the_lines_up_to_the_checkpoint_and_wants_the_same_settings(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(comm, shared_tmp_path)
    assert cli.main(command(comm, data, "--epochs", "2", "--checkpoint-every", "4")) == 0
    comm.Barrier()
    complete = lines_of(data)
    for lost in (0, 1):  # from the end, and from the middle of the second epoch
        if lost and comm.rank == 0:
            (data / "out" / "checkpoints" / "step-000006").rename(data / "away")
        comm.Barrier()
        assert cli.main(command(comm, data, "--epochs", "2", "--resume", "--checkpoint-every", "0")) == 0
        comm.Barrier()
        again = lines_of(data)
        assert [{**line, "seconds": 0, "samples_per_s": 0} for line in again] == [
            {**line, "seconds": 0, "samples_per_s": 0} for line in complete
        ]
    capsys.readouterr()
    code, error = outcome(command(comm, data, "--epochs", "2", "--resume", "--augment", "crop"), capsys)
    assert code == 2
    assert ("was made with other settings: augment was '' and is 'crop'" in error) == (comm.rank == 0)


@pytest.mark.usefixtures("no_picture")
@on_ranks
def test_a_network_learns_to_tell_bands_apart(comm: Any, shared_tmp_path: Path) -> None:
    data = written(comm, shared_tmp_path)
    assert cli.main(command(comm, data, "--epochs", "12", "--optimizer", "adam", "--lr", "0.01")) == 0
    comm.Barrier()
    summary = json.loads((data / "out" / "summary.json").read_text())
    assert summary["train_accuracy"] == 1.0
    assert summary["test_accuracy"] >= 0.9


@pytest.mark.usefixtures("no_picture")
@on_ranks
def test_hdf5_images_without_test_images_are_trained_on(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(comm, shared_tmp_path, lambda folder: image_files.write_hdf5(folder / "train.h5", {"": 9}))
    assert cli.main(command(comm, data, "--steps", "1", "--classes", "11")) == 0
    comm.Barrier()
    summary = json.loads((data / "out" / "summary.json").read_text())
    assert "test_accuracy" not in summary
    assert summary["classes"] == 11
    assert ("no test images: give them with --test-data" in capsys.readouterr().out) == (comm.rank == 0)


NETS = '''
"""Models of a user."""
from torch import nn
import torch

number = 3

def build(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, num_classes))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 10, 28)

    def forward(self, x):
        return self.conv(x).flatten(1)

def cells(in_channels, classes):
    return nn.Conv2d(in_channels, classes, 1)

def text():
    return "a model"

def fails():
    raise KeyError("no such\\nlayer")

def leaves():
    raise SystemExit(3)

def few():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 4))

def wants(depth):
    return Net()
'''


@pytest.fixture
def users_folder(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with MNIST and a module ``users_nets`` that Python does not know yet."""
    written(comm, shared_tmp_path, lambda folder: (folder / "users_nets.py").write_text(NETS) and None)
    written(comm, shared_tmp_path, lambda folder: (folder / "broken_nets.py").write_text("import nowhere") and None)
    monkeypatch.chdir(shared_tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("users_nets", "broken_nets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return written(comm, shared_tmp_path)


@pytest.mark.usefixtures("no_picture")
@on_ranks
@pytest.mark.parametrize("factory", ["build", "Net"])
def test_a_model_of_the_user_is_found_in_the_current_directory(comm: Any, users_folder: Path, factory: str) -> None:
    assert cli.main(command(comm, users_folder, "--steps", "2", "--model", f"users_nets:{factory}")) == 0


@pytest.mark.usefixtures("no_picture")
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "lenet6"], "--model lenet6: there is no such classifier; there are lenet5, "),
        (["--model", "unet"], "--model unet: there is no such classifier"),
        (["--model", "nets.mine:build"], "--model nets.mine:build: there is no module 'nets' in "),
        (["--model", "users_nets.x:build"], "there is no module 'users_nets.x' in "),
        (["--model", "broken_nets:build"], "ModuleNotFoundError: No module named 'nowhere' ("),
        (["--model", "users_nets:missing"], "users_nets.py has no 'missing'"),
        (["--model", "users_nets:number"], "'number' is int; it must be a class or a function"),
        (["--model", "users_nets:text"], "--model users_nets:text returned str; it must return a torch.nn.Module"),
        (["--model", "users_nets:fails"], "users_nets:fails: KeyError: 'no such\\nlayer' ("),
        (["--model", "users_nets:leaves"], "users_nets:leaves: SystemExit: 3 ("),
        (["--model", "users_nets:wants"], "TypeError: wants() missing 1 required positional argument: 'depth'"),
        (["--model", "users_nets:cells"], "gives (16, 10, 28, 28) for images of (1, 28, 28); a classifier gives"),
        (
            ["--model", "users_nets:few"],
            "gives (16, 4) for images of (1, 28, 28); a classifier gives (samples, classes)",
        ),
        (["--model", "users_nets:build", "--width", "4"], "--width 4: the model users_nets:build takes no width"),
        (["--augment", "turn"], "argument --augment: 'turn' is not some of crop,flip"),
        (["--seed", "-1"], "argument --seed: '-1' is not a whole number from 0 on"),
        (["--weight-decay", "-1"], "argument --weight-decay: '-1' is not a number from 0 on"),
        (["--plan", "plan.json"], "argument --plan: not allowed with argument --grid"),
        (["--resume"], "--resume: there is no finished checkpoint in"),
        (["--test-data", "nowhere"], "No such file or directory"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) and len(value) > 1 else "",
)
def test_bad_input_is_one_line_and_code_2(
    comm: Any, users_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    try:
        code = cli.main(command(comm, users_folder, *arguments))
    except SystemExit as end:
        code = int(end.code or 0)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("distconv train classify: ")]
    assert code == 2
    assert [message in line for line in errors] == ([True] if comm.rank == 0 else [])


@on_ranks
def test_a_plan_that_does_not_fit_is_refused(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(comm, shared_tmp_path)
    written(comm, data, lambda folder: dc.Plan({"c9": {"n": 1}}).save(folder / "layer.json"))
    written(comm, data, lambda folder: dc.Plan({"*": {"n": 1}}, ranks=8).save(folder / "ranks.json"))
    for name, reason in (
        ("layer", "plan: 'c9' matches no layer of LeNet5"),
        ("ranks", f"plan: made for 8 ranks, but there are {comm.size}"),
        ("none", "none.json cannot be read: No such file or directory"),
    ):
        arguments = ["train", "classify", "--data", str(data), "--plan", str(data / f"{name}.json")]
        code, error = outcome(arguments, capsys)
        assert code == 2
        assert (reason in error) == (comm.rank == 0)


@pytest.mark.ranks(2)
def test_a_model_that_only_one_rank_cannot_import_is_refused_on_all(
    comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    if comm.rank == 0:
        (tmp_path / "lonely_nets.py").write_text(NETS)
    with pytest.raises(ModelError, match=r"there is no module 'lonely_nets' in .* \(on rank 1\)") as caught:
        build_classifier("lonely_nets:Net", comm, seed=0, in_channels=1, classes=10)
    common(comm, caught.value)
    sys.modules.pop("lonely_nets", None)


@on_ranks
def test_images_that_are_not_finite_are_found_in_the_evaluation(comm: Any, shared_tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        image_files.write_hdf5(folder / "x.h5", {"train": 8, "test": 6})
        with h5py.File(folder / "x.h5", "r+") as file:
            images = file["test/image"][()].astype(np.float32)
            images[5, 0, 3, 3] = np.nan
            del file["test/image"]
            file["test/image"] = images

    folder = written(comm, shared_tmp_path, write)
    trainer = Trainer(Settings(batch=4), ImageSamples(folder / "x.h5", comm), grid_of(comm))
    with pytest.raises(DataError, match=r"the loss on samples 4 to 5 of 'test' is nan; look for NaN") as caught:
        trainer.evaluate("test")
    common(comm, caught.value)


def test_an_accuracy_is_a_share_of_the_samples() -> None:
    assert Score(8, 6, 0.5).accuracy == 0.75
    assert str(Score(8, 6, 0.5)) == "75.00 % (6 of 8), loss 0.5000"


def test_pictures_of_any_channels_can_be_drawn_without_metrics(tmp_path: Path) -> None:
    from distconv.jobs.images.picture import Example, draw

    random = np.random.default_rng(0)
    examples = [Example(random.random((channels, 5, 6)), 1, channels) for channels in (1, 2, 3)]
    draw(tmp_path / "x.png", [*examples, Example(np.zeros((1, 2, 2)), 0, 0)], [], "title")
    assert (tmp_path / "x.png").stat().st_size > 1000
