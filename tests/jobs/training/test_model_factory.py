"""Models by their names: the reference models, and a user's own; what is wrong with a name is said on all ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

from distconv.jobs.training.model_factory import ModelError, build_classifier, build_model, build_segmenter
from tests.distconv.data.sample_files import common
from tests.jobs.training import users_models

users_folder = users_models.users_folder


@pytest.mark.ranks(1, 2)
def test_weights_follow_from_the_seed_and_the_factory_gets_what_it_takes(comm: Any, users_folder: Path) -> None:
    one, again, other = (
        build_model("lenet5", comm, seed=seed, in_channels=2, classes=7).state_dict() for seed in (1, 1, 2)
    )
    assert all(bool((one[name] == again[name]).all()) for name in one)
    assert not bool((one["c1.weight"] == other["c1.weight"]).all())
    assert one["c1.weight"].shape[1] == 2
    mine = build_classifier("users_nets:build", comm, seed=0, in_channels=1, classes=5)
    assert [parameter.shape[0] for parameter in mine.parameters()] == [5, 5]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lenet6", "--model lenet6: no such classifier. Use lenet5, "),
        ("unet", "--model unet: no such classifier"),
        ("nets.mine:build", "--model nets.mine:build: no module 'nets' in "),
        ("users_nets.x:build", "no module 'users_nets.x' in "),
        ("broken_nets:build", "ModuleNotFoundError: No module named 'nowhere' ("),
        ("users_nets:missing", "users_nets.py has no 'missing'"),
        ("users_nets:number", "'number' is int, but must be a class or a function"),
        ("users_nets:text", "--model users_nets:text: returned str, but must return a torch.nn.Module"),
        ("users_nets:fails", "users_nets:fails: KeyError: 'no such\\nlayer' ("),
        ("users_nets:leaves", "users_nets:leaves: SystemExit: 3 ("),
        ("users_nets:wants", "--model users_nets:wants needs 'depth'; give it a default"),
    ],
)
def test_a_model_that_cannot_be_built_is_named_on_all_ranks(
    comm: Any, users_folder: Path, name: str, message: str
) -> None:
    with pytest.raises(ModelError) as caught:
        build_classifier(name, comm, seed=0, in_channels=1, classes=10)
    text = common(comm, caught.value)
    assert message in text
    assert "\n" not in text


@pytest.mark.ranks(2)
def test_a_width_that_a_model_does_not_take_is_refused(comm: Any, users_folder: Path) -> None:
    with pytest.raises(ModelError, match="--width 4: the model users_nets:build has no parameter width"):
        build_classifier("users_nets:build", comm, seed=0, in_channels=1, classes=10, width=4)


def test_modules_of_the_current_directory_stand_in_for_no_others_afterwards(
    comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "local_nets.py").write_text(users_models.NETS)
    (tmp_path / "this.py").write_text("")  # the standard library has one, too
    build_model("local_nets:Net", comm, seed=0, in_channels=1, classes=10)
    assert sys.path[0] != str(tmp_path) and sys.path[-1] == str(tmp_path)
    assert importlib.util.find_spec("this").origin != str(tmp_path / "this.py")
    sys.modules.pop("local_nets", None)


@pytest.mark.parametrize(
    ("build", "name", "more", "message"),
    [
        (build_segmenter, "lenet5", {}, "--model lenet5: no such segmentation network. Use mesh1k, "),
        (build_model, "lenet6", {}, "--model lenet6: no such model. Use "),
        (
            build_model,
            "tests.jobs.training.test_model_factory:needs_classes",
            {},
            "needs 'num_classes'; give --classes",
        ),
        (build_model, "tests.jobs.training.test_model_factory:needs_width", {}, "needs 'width'; give --width"),
        (build_model, "math:pi", {}, "'pi' is float, but must be a class or a function"),
        (build_model, "math:nothing", {}, "has no 'nothing'"),
    ],
)
def test_models_of_another_kind_or_without_their_options_are_refused(
    build: Any, name: str, more: dict[str, int], message: str
) -> None:
    given = {"classes": 3} if build is build_segmenter else {}
    with pytest.raises(ModelError) as caught:
        build(name, MPI.COMM_SELF, seed=0, in_channels=2, **given, **more)
    assert message in str(caught.value)


def needs_classes(num_classes: int) -> torch.nn.Module:
    return torch.nn.Linear(num_classes, 1)


def needs_width(in_channels: int, width: int, *others: int, **more: int) -> torch.nn.Module:
    assert not others and not more
    return torch.nn.Linear(in_channels, width)


def test_factories_get_the_options_that_they_have() -> None:
    here = "tests.jobs.training.test_model_factory"
    classes = build_segmenter(f"{here}:needs_classes", MPI.COMM_SELF, seed=3, in_channels=2, classes=5)
    wide = build_model(f"{here}:needs_width", MPI.COMM_SELF, seed=3, in_channels=2, width=7)
    assert (classes.weight.shape, wide.weight.shape) == ((1, 5), (7, 2))
    torch.manual_seed(3)
    assert torch.equal(wide.weight, torch.nn.Linear(2, 7).weight)
    unet = build_segmenter("unet", MPI.COMM_SELF, seed=0, in_channels=2, classes=5, width=3)
    assert unet(torch.zeros(1, 2, 16, 16)).shape == (1, 5, 16, 16)
