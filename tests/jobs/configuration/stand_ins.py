"""What distconv calls of MLflow and of Weights & Biases, and no more: both are large, and tests do without them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

Scalars = dict[str, list[tuple[int, float]]]


class MlflowClient:
    """Keeps runs in a JSON file in place of a database."""

    def __init__(self, tracking_uri: str) -> None:
        self.path = Path(tracking_uri.removeprefix("sqlite:///"))
        self.kept = json.loads(self.path.read_text()) if self.path.exists() else {"experiments": [], "runs": []}

    def _keep(self) -> None:
        self.path.write_text(json.dumps(self.kept))

    def get_experiment_by_name(self, name: str) -> Any:
        found = self.kept["experiments"]
        return SimpleNamespace(experiment_id=found.index(name)) if name in found else None

    def create_experiment(self, name: str, artifact_location: str) -> int:
        assert artifact_location == (self.path.parent / "mlflow").as_uri()
        self.kept["experiments"].append(name)
        return len(self.kept["experiments"]) - 1

    def search_runs(self, experiment_ids: list[int]) -> list[Any]:
        assert experiment_ids == [self.kept["experiments"].index("distconv")]
        runs = enumerate(self.kept["runs"])
        return [SimpleNamespace(info=SimpleNamespace(run_id=number)) for number, run in runs if not run["deleted"]]

    def delete_run(self, run_id: int) -> None:
        self.kept["runs"][run_id]["deleted"] = True
        self._keep()

    def create_run(self, experiment_id: int, run_name: str) -> Any:
        assert (experiment_id, run_name) == (self.kept["experiments"].index("distconv"), self.path.parent.name)
        self.kept["runs"].append({"deleted": False, "status": "RUNNING", "metrics": {}})
        return SimpleNamespace(info=SimpleNamespace(run_id=len(self.kept["runs"]) - 1))

    def log_batch(self, run_id: int, metrics: list[Any]) -> None:
        for key, value, timestamp, step in metrics:
            assert timestamp == 0
            self.kept["runs"][run_id]["metrics"].setdefault(key, []).append((step, value))
        self._keep()

    def set_terminated(self, run_id: int) -> None:
        self.kept["runs"][run_id]["status"] = "FINISHED"
        self._keep()


def of_mlflow(folder: Path) -> Scalars:
    (run,) = [run for run in json.loads((folder / "mlflow.db").read_text())["runs"] if not run["deleted"]]
    assert run["status"] == "FINISHED"
    return {name: [(step, value) for step, value in values] for name, values in run["metrics"].items()}


class Run:
    """Appends to a file of its folder what is logged; steps do not go back."""

    def __init__(self, folder: Path) -> None:
        self.path, self.step = folder / "log", 0
        folder.mkdir(parents=True)

    def log(self, numbers: dict[str, float], step: int) -> None:
        assert step >= self.step
        self.step = step
        with self.path.open("a") as file:
            file.write(json.dumps([step, numbers]) + "\n")

    def finish(self) -> None:
        (self.path.parent / "finished").touch()


def of_wandb(folder: Path) -> Scalars:
    (place,) = (folder / "wandb").glob("offline-run-*-distconv-*")
    assert (place / "finished").exists()
    found: Scalars = {}
    for step, numbers in map(json.loads, (place / "log").read_text().splitlines()):
        for name, value in numbers.items():
            found.setdefault(name, []).append((step, value))
    return found


def init(*, dir: str, mode: str, project: str, name: str, id: str, settings: Any) -> Run:
    assert (mode, project, name) == ("offline", "distconv", Path(dir).name)
    assert vars(settings) == {
        **{"silent": True, "console": "off", "x_disable_stats": True, "x_disable_meta": True},
        **{"disable_git": True, "save_code": False},
    }
    assert len(id) == len("distconv-") + 8
    place = Path(dir) / "wandb"
    return Run(place / f"offline-run-{len(list(place.glob('*')))}-{id}")


def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both be what is imported."""
    parts: dict[str, dict[str, Any]] = {
        "mlflow": {},
        "mlflow.entities": {"Metric": lambda *of: of},
        "mlflow.tracking": {"MlflowClient": MlflowClient},
        "wandb": {"init": init, "Settings": SimpleNamespace},
    }
    for name, attributes in parts.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
