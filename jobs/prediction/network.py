"""The network of a prediction: from a run's checkpoint, or from a file of weights.

:func:`find_network` reads the metadata, :func:`build_network` builds the network, and :func:`distribute_network`
distributes it and loads the weights of a checkpoint. Called by ``distconv predict``. Checkpoints are independent of the
grid, so that a prediction may use any grid.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from distconv import checkpoint
from distconv.checkpoint.values import from_json
from distconv.checkpoint.verification import read_complete_manifest
from distconv.communication.agreement import try_on_rank_0
from distconv.errors import CheckpointError
from distconv.grid import ProcessGrid
from distconv.jobs.images.classification import ImageSettings as ImageSettings
from distconv.jobs.mesh.segmentation import MeshSettings as MeshSettings
from distconv.jobs.mesh.segmentation import build as build_mesh
from distconv.jobs.training.model_factory import ModelError, build_classifier, build_model, build_segmenter
from distconv.jobs.training.run import CHECKPOINTS
from distconv.jobs.training.settings import TrainingSettings
from distconv.parallel import parallelize
from distconv.parameters.weight_files import load_weights


@dataclass(frozen=True)
class TrainedNetwork:
    """Source of the network of a prediction."""

    path: Path
    task: str
    """Task of the training. Empty for a file of weights."""
    settings: Mapping[str, Any]
    """Settings of the training, as its checkpoint stores them. Empty for a file of weights."""
    notes: Mapping[str, Any]
    """Metadata of the trainer (``Recoverable.notes``), with the normalization. Empty for a file of weights."""
    digest: str
    """Hash of the weights. An interrupted output is resumed only with the same weights."""
    folder: Path | None = None
    """Folder of the checkpoint. None for a file of weights."""

    @property
    def names(self) -> tuple[str, str]:
        """Names of the datasets of samples and labels, without their groups."""
        image, label = self.notes.get("names", ("input", "label") if self.task == "mesh" else ("image", "label"))
        return image, label


def find_network(path: Path, comm: MPI.Intracomm) -> TrainedNetwork:
    """Find the network of a prediction. Collective: call on every rank.

    Parameters
    ----------
    path : pathlib.Path
        Folder of a run (``--out`` of a training), folder of checkpoints, or file of weights.
    comm : mpi4py.MPI.Intracomm

    Returns
    -------
    TrainedNetwork

    Raises
    ------
    CheckpointError
        On all ranks, if there is no checkpoint or file, or the checkpoint lacks the settings of its training.
    """

    def look() -> TrainedNetwork:
        if path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            return TrainedNetwork(path, "", {}, {}, digest)
        # On rank 0 alone, so nothing here may communicate with the other ranks.
        directory = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
        folder = checkpoint.newest(directory, MPI.COMM_SELF)
        if folder is None:
            raise CheckpointError(f"{path}: neither a finished checkpoint nor a file of weights")
        manifest = read_complete_manifest(folder)
        values = from_json(manifest["values"])
        notes = checkpoint_notes(values)
        if "task" not in notes or "settings" not in values:
            raise CheckpointError(
                f"{folder}: the settings of the training are missing. Export the weights (distconv checkpoint "
                "export), and give --model and --normalise-as."
            )
        # The manifest has a hash of each file, so the files themselves need not be read.
        digest = hashlib.sha256(json.dumps(manifest["files"], sort_keys=True).encode()).hexdigest()
        return TrainedNetwork(path, notes["task"], values["settings"], notes, digest, folder)

    return try_on_rank_0(comm, look, CheckpointError)


def checkpoint_notes(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the notes of a checkpoint, or an empty mapping if it was not written by ``distconv train``."""
    notes = values.get("notes")
    return notes if isinstance(notes, dict) else {}


def settings_of_run(trained: TrainedNetwork, kind: type[TrainingSettings]) -> TrainingSettings:
    """Return the settings of a run as an instance of ``kind``, without unknown settings.

    Parameters
    ----------
    trained : TrainedNetwork
        The run.
    kind : type
        Class of the settings.

    Returns
    -------
    TrainingSettings
    """
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in trained.settings.items() if name in names})


def build_network(trained: TrainedNetwork, comm: MPI.Intracomm, *, channels: int, options: Any) -> torch.nn.Module:
    """Build the network. Collective: call on every rank.

    Weights of a file are loaded. Those of a checkpoint are loaded by :func:`distribute_network`.

    Parameters
    ----------
    trained : TrainedNetwork
    comm : mpi4py.MPI.Intracomm
    channels : int
        Channels of a sample.
    options : argparse.Namespace
        Options of ``distconv predict``, which describe the network of a file of weights.

    Returns
    -------
    torch.nn.Module

    Raises
    ------
    ModelError
        On all ranks, if the network cannot be built, or the weights do not fit it.
    """
    if trained.task == "mesh":
        return build_mesh(settings_of_run(trained, MeshSettings))  # type: ignore[arg-type]
    if trained.task in ("classify", "segmentation"):
        settings = settings_of_run(trained, ImageSettings)
        factory = build_classifier if trained.task == "classify" else build_segmenter
        return factory(
            settings.model,
            comm,
            seed=settings.seed,
            in_channels=channels,
            classes=trained.notes["classes"],
            width=settings.width,
        )
    if options.model is None:
        raise ModelError(f"{trained.path}: holds weights only. Name the network with --model package.module:factory.")
    model = build_model(options.model, comm, seed=0, in_channels=channels, classes=options.classes, width=options.width)
    load_weights(model, trained.path, comm, of=f"--model {options.model}", unfit=ModelError)
    return model


def distribute_network(
    trained: TrainedNetwork, model: torch.nn.Module, grid: ProcessGrid, device: str, dtype: torch.dtype
) -> Callable[[Any], Any]:
    """Distribute the network over a grid and load the weights of a checkpoint. Collective: call on every rank.

    Parameters
    ----------
    trained : TrainedNetwork
    model : torch.nn.Module
        Result of :func:`build_network`.
    grid : ProcessGrid
    device : str
        Device of this rank.
    dtype : torch.dtype
        Weights are converted to it.

    Returns
    -------
    callable
        The network in evaluation mode.
    """
    batch_norm = str(trained.settings.get("batch_norm", "global"))
    # A network whose weights were sharded in training may be too large for a rank.
    model = parallelize(
        model.to(device, dtype),
        grid,
        comm=grid.world,
        batch_norm=batch_norm,
        shard_weights=trained.settings.get("shard_weights"),
    )
    if trained.folder is not None:

        def check(contents: checkpoint.CheckpointMetadata) -> None:
            checkpoint.check_fits(contents, model, None, convert_dtype=True)

        loaded = checkpoint.load(trained.folder, grid.world, checkpoint.layout_resolver(model), check)
        checkpoint.restore_state(checkpoint.with_average(loaded), model, None, grid.world, convert_dtype=True)
    return model.eval()
