"""Scalars of a run for TensorBoard, MLflow or Weights & Biases, stored on this machine.

They are those of metrics.jsonl. Trackers cannot remove the values after a checkpoint. A resumed run therefore deletes
its earlier run from the tracker, and writes the values up to the checkpoint again.
"""

from __future__ import annotations

import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from distconv.errors import DataError

FOLDER = "tensorboard"
DATABASE = "mlflow.db"
_OURS = "distconv-"
"""Prefix of the run ids written here, which distinguishes them from other runs in the same folder."""


class Tracker(ABC):
    """Writer of the numbers in metrics.jsonl to a tracking system."""

    def __init__(self, folder: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        """Delete what an earlier run in ``folder`` wrote, open the tracker, and write the ``lines`` to keep of it."""
        self._begin(folder)
        for line in lines:
            self.write(line)

    @abstractmethod
    def _begin(self, folder: Path) -> None:
        """Remove earlier values of the run and open the tracker."""

    def write(self, line: Mapping[str, Any]) -> None:
        """Add the numbers of a line: ``loss`` of a step, ``test/loss`` of an evaluation."""
        group = f"{line['evaluation']}/" if "evaluation" in line else ""
        numbers = {
            f"{group}{name}": float(value)
            for name, value in line.items()
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        self._add(numbers, line["step"])

    @abstractmethod
    def _add(self, numbers: Mapping[str, float], step: int) -> None:
        """Write the named numbers of a step."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left."""


class TensorBoard(Tracker):
    """Event files in ``folder/tensorboard``."""

    def _begin(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = folder / FOLDER
        if place.is_dir() and not place.is_symlink():
            for events in place.glob("events.out.tfevents.*"):
                events.unlink()
        self._writer = SummaryWriter(str(place))

    def _add(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class MLflow(Tracker):
    """The database ``folder/mlflow.db``, which has one run of the experiment ``distconv`` that is not deleted."""

    def _begin(self, folder: Path) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        place = (folder / DATABASE).absolute()
        if place.is_symlink():
            raise DataError(
                f"--track mlflow: {place} is a symbolic link, and its database may hold runs of others. Remove "
                "the link."
            )
        self._metric = Metric
        self._client = MlflowClient(tracking_uri=f"sqlite:///{place}")
        present = self._client.get_experiment_by_name("distconv")
        artifacts = (folder / "mlflow").absolute().as_uri()
        experiment = present.experiment_id if present else self._client.create_experiment("distconv", artifacts)
        for run in self._client.search_runs([experiment]):
            self._client.delete_run(run.info.run_id)
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id

    def _add(self, numbers: Mapping[str, float], step: int) -> None:
        metrics = [self._metric(name, value, 0, step) for name, value in numbers.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


class WandB(Tracker):
    """An offline run in ``folder/wandb``, for ``wandb sync``."""

    def _begin(self, folder: Path) -> None:
        import wandb

        if not (folder / "wandb").is_symlink():
            for earlier in (folder / "wandb").glob(f"offline-run-*-{_OURS}*"):
                shutil.rmtree(earlier)
        settings = wandb.Settings(
            silent=True, console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True, save_code=False
        )
        self._run = wandb.init(
            dir=str(folder),
            mode="offline",
            project="distconv",
            name=folder.name,
            id=f"{_OURS}{secrets.token_hex(4)}",
            settings=settings,
        )

    def _add(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


_KINDS: dict[str, tuple[type[Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "mlflow": (MLflow, "mlflow"),
    "wandb": (WandB, "wandb"),
}
TRACKERS = tuple(_KINDS)


def open_tracker(name: str, folder: Path, lines: Iterable[Mapping[str, Any]]) -> Tracker:
    """Open a tracker.

    Parameters
    ----------
    name : str
        One of ``TRACKERS``.
    folder : pathlib.Path
        Folder of the run.
    lines : iterable of mapping
        Lines of metrics.jsonl kept from an interrupted run.

    Returns
    -------
    Tracker

    Raises
    ------
    DataError
        If its package is not installed, or raises any error but an OSError.
    OSError
        If its files cannot be written.
    """
    kind, package = _KINDS[name]
    try:
        return kind(folder, lines)
    except ImportError as error:
        raise DataError(f"--track {name}: not installed. Run pip install {package}.") from error
    except OSError:
        raise
    except Exception as error:  # whatever such a package raises: other ranks wait for this one
        raise DataError(f"--track {name}: {' '.join(f'{error}'.split()) or type(error).__name__}") from error
