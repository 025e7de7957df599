"""Training takes the same steps on any grid: losses and final weights equal plain torch on one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv import cli
from distconv.jobs.mesh.segmentation import MeshSettings
from distconv.jobs.mesh.synthetic_samples import write_synthetic
from distconv.jobs.training.settings import TrainingSettings
from distconv.jobs.verification import exactness
from distconv.jobs.verification.exactness import Difference, RandomSamples, Run
from distconv.layers.models import MODELS
from tests.jobs.command_lines import assert_refused, commands_in, option_tests

GRIDS = {2: ["h=2"], 4: ["h=2,w=2", "n=2,h=2"], 5: ["w=5"]}
STEPS = 20


@pytest.mark.long
@pytest.mark.fault(44)
@pytest.mark.ranks(*GRIDS)
@pytest.mark.time_limit(300)
def test_steps_on_any_grid_equal_those_of_plain_torch(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    settings = MeshSettings("unet", 4, batch=4, steps=STEPS, optimizer="adam", lr=exactness.RATE, dtype="float64")
    if comm.rank == 0:
        write_synthetic(path, (50, 36))  # eight training samples: an epoch has two steps
    comm.Barrier()
    expected = exactness.reference(settings, path, comm)
    assert len(expected.losses) == STEPS
    for text in GRIDS[comm.size]:
        grid = dc.ProcessGrid(comm, **dc.parse_grid(text))
        found = exactness.train(settings, path, grid)
        apart = exactness.difference(found, expected)
        assert apart.loss <= 1e-10, (text, apart)
        assert apart.weight <= 1e-9, (text, apart)


def test_random_samples_have_the_targets_of_the_model() -> None:
    def shape(predicts: str, classes: int, sample: tuple[int, ...]) -> tuple[Any, ...]:
        samples = RandomSamples(sample, classes, predicts)
        x, target = samples.batch(5, 1)
        assert x.shape == (5, *sample) and x.dtype == torch.float64 and 0.5 < x.std() < 1.5
        assert torch.equal(x, samples.batch(5, 1)[0]) and not torch.equal(x, samples.batch(5, 2)[0])
        largest = None if target.is_floating_point() else int(target.max())
        return tuple(target.shape), largest, samples.target_axes

    assert shape("values", 4, (2, 6, 7)) == ((5, 4), None, ("n", None))
    assert shape("classes", 2, (2, 6, 7)) == ((5,), 1, ("n",))
    assert shape("cells", 1, (2, 6, 7)) == ((5, 6, 7), 1, ("n", "h", "w"))
    assert shape("cells", 3, (2, 4, 6, 7)) == ((5, 4, 6, 7), 2, ("n", "d", "h", "w"))


def test_the_loss_is_that_of_the_targets() -> None:
    y = torch.tensor([[0.0, 2.0], [1.0, -1.0]])
    assert RandomSamples((1, 2), 2, "values").loss(y, y + torch.tensor([[1.0, 0], [0, 3]])).item() == 2.5
    whole = RandomSamples((1, 2), 2, "classes").loss(y, torch.tensor([0, 1])).item()
    assert whole == pytest.approx((math.log(1 + math.e**2) + math.log(1 + math.e**2)) / 2)
    single = RandomSamples((1, 2), 1, "cells").loss(y[:, None], torch.tensor([[0, 1], [1, 0]])).item()
    terms = (math.log(2), math.log(1 + math.e**-2), math.log(1 + math.e**-1), math.log(1 + math.e**-1))
    assert single == pytest.approx(sum(terms) / 4)


def test_differences_are_relative_to_the_largest_value() -> None:
    expected = Run([2.0, -4.0], {"a": torch.tensor([1.0, -8.0]), "b": torch.tensor([1e-9])})
    found = Run([2.0, -5.0], {"a": torch.tensor([3.0, -8.0]), "b": torch.tensor([1e-7])})
    assert exactness.difference(found, expected) == Difference(0.25, 0.25)
    found.weights["a"] = expected.weights["a"]
    assert exactness.difference(found, expected).weight == pytest.approx((1e-7 - 1e-9) / 1e-6)
    limits = ((1e-10, 1e-9, True), (1.1e-10, 1e-9, False), (1e-10, 1.1e-9, False))
    assert [Difference(loss, weight).exact for loss, weight, _ in limits] == [exact for *_, exact in limits]


def test_random_samples_train_on_a_grid_as_without() -> None:
    settings = TrainingSettings("lenet5", None, batch=3, steps=2, optimizer="sgd", lr=0.01, dtype="float64")
    deviation, changed = exactness.compare_at_random(settings, (28, 28), MPI.COMM_SELF, {"n": 1})
    assert deviation.exact and 0 < changed.loss < 1e-12
    found = exactness.train_at_random(settings, RandomSamples((1, 28, 28), 10, "classes"), None)
    torch.manual_seed(settings.seed)
    model = MODELS["lenet5"](in_channels=1, classes=10).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, settings.momentum, weight_decay=settings.weight_decay)
    losses = []
    for step in range(2):
        x, target = RandomSamples((1, 28, 28), 10, "classes").batch(3, step)
        loss = torch.nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert found.losses == losses
    assert all(torch.equal(found.weights[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("words", "compared", "text"),
    [
        ("--model mesh1k --grid h=2,w=3 --steps 3", ("mesh1k", 8, 4, 3, "adam", 3e-4, (64, 64), {"h": 2, "w": 3}),
         "mesh1k width 8, 64x64, batch 4, 3 steps of adam, float64, grid h=2,w=3: losses differ by 3.0e-11, weights by "
         "2.0e-12: equal (plain torch with each batch reversed: 4.0e-03, 5.0e-04)"),
        ("--model resnet50 --optimizer sgd --lr 0.5", ("resnet50", None, 4, 20, "sgd", 0.5, (224, 224), {"n": 1}),
         "resnet50 width as published, 224x224, batch 4, 20 steps of sgd, float64, grid n=1: losses differ by 3.0e-11, "
         "weights by 2.0e-08: NOT EQUAL (plain torch with inputs changed by 1e-15: 4.0e-03, 5.0e-04)"),
        ("--size 8x9 --width 5", ("unet", 5, 4, 20, "adam", 3e-4, (8, 9), {"n": 1}), None),
    ],
)  # fmt: skip
def test_the_command_compares_and_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, compared: Any, text: str | None
) -> None:
    mesh = "resnet" not in words
    seen = []

    def compare(settings: Any, size: Any, comm: Any, axes: Any) -> list[Difference]:
        names = ("model", "width", "batch", "steps", "optimizer", "lr")
        seen.append((*(getattr(settings, name) for name in names), size, axes))
        assert settings.dtype == "float64"
        return [Difference(3e-11, 2e-12 if mesh else 2e-8), Difference(4e-3, 5e-4)]

    monkeypatch.setattr(exactness, "compare_mesh" if mesh else "compare_at_random", compare)
    assert cli.main(["verify", "exactness", *words.split()]) == (0 if mesh else 1)
    assert seen == [compared]
    assert capsys.readouterr().out.rstrip("\n") == text or text is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model unet3d --size 8x9", "--size 8x9: samples of unet3d have 3 extents, not 2; for example --size 8x9x8"),
        ("--size 8x", "'8x' is not the extents of an image, such as 64x48"),
        ("--size 8x0", "'8x0' is not the extents of an image, such as 64x48"),
    ],
)
def test_other_extents_are_refused(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    assert_refused(capsys, ["verify", "exactness", *words.split()], message)


test_options_are_approved, test_documented_defaults_hold = option_tests(*commands_in(__file__))
