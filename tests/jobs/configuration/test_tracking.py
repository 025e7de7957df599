"""Trackers: each scalar of metrics.jsonl once, their calls as approved, and errors."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distconv.errors import DataError
from distconv.jobs.configuration import tracking
from distconv.jobs.configuration.tracking import open_tracker
from tests.jobs.approved import assert_approved

LINES = [{"step": step, "loss": 0.5**step, "optimizer": "sgd", "done": True} for step in range(1, 5)]


class Noted:
    """A module or object that notes each call of it and of its attributes; ``answers`` has results by name."""

    def __init__(self, calls: list[str], answers: dict[str, Any], name: str) -> None:
        self._calls, self._answers, self._name = calls, answers, name

    def __getattr__(self, name: str) -> Noted:
        return Noted(self._calls, self._answers, f"{self._name}.{name}")

    def __call__(self, *given: Any, **named: Any) -> Any:
        self._calls.append(f"{self._name}{given} {named}")
        return self._answers.get(self._name, Noted(self._calls, self._answers, f"{self._name}()"))

    def __repr__(self) -> str:
        return self._name


def installed(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any]) -> list[str]:
    """Replace MLflow and Weights & Biases, which are large; return their calls."""
    calls: list[str] = []
    for name in ("mlflow", "mlflow.entities", "mlflow.tracking", "wandb"):
        monkeypatch.setitem(sys.modules, name, Noted(calls, answers, name))
    return calls


def track_an_interrupted_run(name: str, folder: Path) -> None:
    """The first part is killed after four steps, and the second goes on from the checkpoint of step 2."""
    first = open_tracker(name, folder, [])
    for line in LINES:
        first.write(line)
    if name == "tensorboard":
        first.close()
    second = open_tracker(name, folder, LINES[:2])
    for line in (*LINES[2:], {"step": 4, "evaluation": "test", "accuracy": 1}):
        second.write(line)
    second.close()


def test_tensorboard_has_each_scalar_of_a_run_that_goes_on_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "notes.txt").write_text("of a user")
    track_an_interrupted_run("tensorboard", tmp_path)
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    scalars = {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    assert scalars == {"loss": [(line["step"], line["loss"]) for line in LINES], "test/accuracy": [(4, 1.0)]}
    assert (tmp_path / "tensorboard" / "notes.txt").read_text() == "of a user"


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
@pytest.mark.parametrize("exists", [False, True])
def test_calls_of_other_trackers_are_as_approved(
    name: str, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = "mlflow.tracking.MlflowClient()"
    answers = {
        f"{client}.get_experiment_by_name": SimpleNamespace(experiment_id=7) if exists else None,
        f"{client}.search_runs": [SimpleNamespace(info=SimpleNamespace(run_id=run)) for run in (3, 5)] * exists,
    }
    calls = installed(monkeypatch, answers)
    monkeypatch.setattr(tracking.secrets, "token_hex", lambda count: "ab" * count)
    ours, others = ("offline-run-20260101_000000-distconv-1", "offline-run-20260101_000000-x1y2z3w4")
    for folder in (ours, others):
        (tmp_path / "run" / "wandb" / folder).mkdir(parents=True)
    track_an_interrupted_run(name, tmp_path / "run")
    assert_approved(f"tracking-{name}-{exists}", "\n".join(calls).replace(str(tmp_path), "FOLDER"))
    left = [folder.name for folder in (tmp_path / "run" / "wandb").iterdir()]
    assert sorted(left) == ([others] if name == "wandb" else [ours, others])


@pytest.mark.parametrize(("name", "package"), [("mlflow", "mlflow.entities"), ("wandb", "wandb")])
def test_what_is_not_installed_is_named(
    tmp_path: Path, name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"--track {name}: not installed. Run pip install {name}"):
        open_tracker(name, tmp_path, [])


def test_a_database_of_others_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {})
    (tmp_path / "mlflow.db").symlink_to(tmp_path / "central.db")
    with pytest.raises(DataError, match=r"--track mlflow: .*mlflow.db is a symbolic link"):
        open_tracker("mlflow", tmp_path, [])


def test_what_a_tracker_cannot_do_is_an_error_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(Exception):
        pass

    def refuse(**_: object) -> None:
        raise Refused("no room\nleft")

    installed(monkeypatch, {})
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
