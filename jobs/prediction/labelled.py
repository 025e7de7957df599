"""Predictions of classifiers whose samples are opened as for training.

These are point clouds, sequences and images as downloaded, which are not index ranges of an array. The scaling of
values comes from the training samples. The held-out samples are predicted, or all samples if none are held out.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from distconv import checkpoint
from distconv.cli import COMMANDS, make_parser
from distconv.communication.agreement import try_on_all_ranks
from distconv.data.opening import is_source_path
from distconv.errors import DataError
from distconv.grid import ProcessGrid
from distconv.jobs.training.classifier import Score, score
from distconv.jobs.training.options import default_grid
from distconv.placement import scatter
from distconv.writing import count_written_rows, open_output

from .network import TrainedNetwork
from .samples import DATASET, NIFTI


def is_labelled(trained: TrainedNetwork, data: Path) -> bool:
    """Return True if the samples are opened as for training, not read as index ranges of an array.

    Parameters
    ----------
    trained : TrainedNetwork
        The network.
    data : pathlib.Path
        Value of ``--data``.

    Returns
    -------
    bool
    """
    arrays = is_source_path(data) or data.suffix in (".h5", ".hdf5")
    return trained.task in ("pointcloud", "sequence") or (trained.task == "classify" and not arrays)


def predict(
    options: argparse.Namespace, trained: TrainedNetwork, device: str, comm: MPI.Intracomm
) -> tuple[Path, str, Score]:
    """Predict the held-out samples and write their probabilities. Collective: call on every rank.

    Parameters
    ----------
    options : argparse.Namespace
        Options of ``distconv predict``.
    trained : TrainedNetwork
        The network, from a checkpoint.
    device : str
        Device of this rank.
    comm : mpi4py.MPI.Intracomm

    Returns
    -------
    (pathlib.Path, str, Score)
        The written file, the group of samples, and its score.

    Raises
    ------
    DataError
        On all ranks, if samples cannot be read, or predictions written.
    """
    if options.format == NIFTI:
        raise DataError(f"--format {NIFTI}: the predictions are not volumes. Use zarr or h5.")
    module = importlib.import_module(COMMANDS["train", trained.task].module)
    # The options of the training: defaults, replaced by the settings that the checkpoint has stored.
    training = make_parser(f"distconv train {trained.task}", module).parse_args([])
    job = module.JOB
    names = {field.name for field in fields(job.settings)}
    settings = job.settings(**{name: value for name, value in trained.settings.items() if name in names})
    settings = replace(settings, accumulate=1, ema=None)  # they matter in training alone
    for name, value in trained.settings.items():
        setattr(training, name, value)
    training.data = None if str(options.data) == "embedded" else options.data
    path = options.out / f"{DATASET}.{options.format}"
    try_on_all_ranks(comm, lambda: options.out.mkdir(parents=True, exist_ok=True), DataError)
    count_written_rows(path, comm)  # raises for a foreign or finished file, before anything is computed
    with closing(job.samples(training, comm)) as samples:
        if "mean" in trained.notes:
            # Use the moments of the training, which may have had fewer samples.
            scales = {name: np.array(trained.notes[name]) for name in ("mean", "std")}
            samples.moments = replace(samples.moments, **scales)
        grid = ProcessGrid(comm, **(options.grid or default_grid(comm.size, settings.batch, job.rest_along)))
        more: Mapping[str, Any] = {name: getattr(training, name) for name in job.trainer_options}
        trainer = job.trainer(settings, samples, grid, device, **more)
        assert trained.folder is not None
        loaded = checkpoint.load(trained.folder, comm, checkpoint.layout_resolver(trainer.model))
        checkpoint.restore_state(checkpoint.with_average(loaded), trainer.model, None, comm)
        group = "test" if "test" in samples.groups else "train"
        labels = samples.groups[group].labels
        logits = torch.cat([each for _, each in trainer.predictions(group)])
        found_score = score(samples.source_path(group), group, [(range(len(labels)), torch.as_tensor(labels), logits)])
        values = scatter(torch.softmax(logits, 1), ProcessGrid(comm, n=comm.size))
        note = {"weights": trained.digest, "data": str(options.data)}
        output = open_output(path, DATASET, tuple(values.shape), values.dtype, comm, note=note)
        output.write(0, values)
        output.finish()
        trainer.close()
    return path, group, found_score
