"""Scalars that trackers have are those of metrics.jsonl, none twice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distconv.errors import DataError
from distconv.jobs.configuration.tracking import TRACKERS, open_tracker
from tests.jobs.configuration.stand_ins import Scalars, installed, of_mlflow, of_wandb


def of_tensorboard(folder: Path) -> Scalars:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.parametrize("name", TRACKERS)
def test_a_run_that_goes_on_has_each_scalar_once(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    lines = [{"step": step, "loss": 0.5**step, "optimizer": "sgd", "done": True} for step in range(1, 5)]
    first = open_tracker(name, tmp_path, [])
    for line in lines:
        first.write(line)
    if name == "tensorboard":  # the others are killed
        first.close()
    for place in ("tensorboard", "wandb"):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / "notes.txt").write_text("of a user")
    others = tmp_path / "wandb" / "offline-run-20260101_000000-x1y2z3w4"
    others.mkdir()
    second = open_tracker(name, tmp_path, lines[:2])  # resumed from step 2
    for line in (*lines[2:], {"step": 4, "evaluation": "test", "accuracy": 1}):
        second.write(line)
    second.close()
    assert all((tmp_path / place / "notes.txt").read_text() == "of a user" for place in ("tensorboard", "wandb"))
    assert others.is_dir()
    scalars = {"tensorboard": of_tensorboard, "mlflow": of_mlflow, "wandb": of_wandb}[name](tmp_path)
    assert scalars == {"loss": [(line["step"], line["loss"]) for line in lines], "test/accuracy": [(4, 1.0)]}


@pytest.mark.parametrize(("name", "package"), [("mlflow", "mlflow.entities"), ("wandb", "wandb")])
def test_what_is_not_installed_is_named(
    tmp_path: Path, name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"--track {name}: not installed. Run pip install {name}"):
        open_tracker(name, tmp_path, [])


def test_a_database_of_others_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    (tmp_path / "mlflow.db").symlink_to(tmp_path / "central.db")
    with pytest.raises(DataError, match=r"--track mlflow: .*mlflow.db is a symbolic link"):
        open_tracker("mlflow", tmp_path, [])


def test_what_a_tracker_cannot_do_is_an_error_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(Exception):
        pass

    def refuse(**_: object) -> None:
        raise Refused("no room\nleft")

    installed(monkeypatch)
    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(DataError, match=r"^--track wandb: no room left$"):
        open_tracker("wandb", tmp_path, [])
    for error, kind, text in (
        (Refused(), DataError, "^--track wandb: Refused$"),
        (OSError("full"), OSError, "^full$"),
        (ImportError(), DataError, "^--track wandb: not installed. Run pip install wandb"),
    ):

        def fail(error: Exception = error, **_: object) -> None:
            raise error

        monkeypatch.setattr(sys.modules["wandb"], "init", fail)
        with pytest.raises(kind, match=text) as raised:
            open_tracker("wandb", tmp_path, [])
        assert type(raised.value) is kind
