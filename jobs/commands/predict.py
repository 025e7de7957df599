"""Predict with a trained network: a run of ``distconv train``, or a file of weights.

Writes to the folder --out: prediction.zarr (or .h5) with the dataset ``prediction`` (N, C, ...) of probabilities, or a
folder of NIfTI volumes with the affine matrices of the samples; summary.json with scores if there are labels; and
result.png. The output of an interrupted job is marked as incomplete, and the same command resumes it. With --window,
large samples are predicted window by window, and no rank holds a full sample.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from distconv.communication.agreement import try_on_all_ranks
from distconv.errors import DataError, GridError
from distconv.grid import ProcessGrid
from distconv.jobs.prediction import labelled
from distconv.jobs.prediction.network import TrainedNetwork, build_network, distribute_network, find_network
from distconv.jobs.prediction.samples import NIFTI, PredictionRun, loader_field, open_inputs
from distconv.jobs.prediction.scores import draw, score
from distconv.jobs.training.options import (
    add_device_argument,
    add_reading_arguments,
    fraction_below_one,
    grid_shape,
    positive_int,
    select_device,
)
from distconv.jobs.training.report import SUMMARY, draw_figure, peak_memory_bytes
from distconv.whole_files import write_file

EXAMPLES = """\
examples:
  mpiexec -n 4 distconv predict runs/mesh --data mesh.h5 --out predicted
  mpiexec -n 4 distconv predict runs/mesh --data big.zarr --window h=512,w=512 --overlap 0.5 --out predicted
  mpiexec -n 4 distconv predict unet.safetensors --model mypackage.nets:unet3d --data ct.nc --image-name volume \\
      --normalise-as training.nc --grid d=2,h=2 --out predicted
  mpiexec -n 4 distconv predict runs/ct --data "scans/*.nii.gz" --format nii.gz --window d=96,h=96,w=96 --out predicted
  distconv predict runs/classify --data images.h5 --out predicted
  distconv predict runs/sequence --data embedded --out predicted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv predict``."""
    _add_files(parser)
    _add_network(parser)
    _add_windows(parser)
    _add_output(parser)
    add_reading_arguments(parser)
    add_device_argument(parser)


def _add_files(parser: argparse.ArgumentParser) -> None:
    """Add the weights, the samples and the output folder."""
    parser.add_argument(
        "weights",
        type=Path,
        metavar="RUN|WEIGHTS",
        help="output folder or checkpoint of distconv train, or a file of weights (.pt or .safetensors)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="PATH",
        help="samples, in a format that distconv train reads (docs/how-to/data-formats.md)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="output folder")
    parser.add_argument(
        "--image-name", metavar="NAME", help="dataset of the samples (default: the run's held-out samples, or image)"
    )
    parser.add_argument(
        "--label-name", metavar="NAME", help="dataset of the labels (default: the one next to the samples)"
    )


def _add_network(parser: argparse.ArgumentParser) -> None:
    """Add the options that a training run has stored, and a file of weights has not."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="model of a file of weights: a reference model, or your own as package.module:factory",
    )
    parser.add_argument(
        "--classes", type=positive_int, help="classes of the model of a file of weights (default: the model's own)"
    )
    parser.add_argument(
        "--width", type=positive_int, help="channels of the model of a file of weights (default: the model's own)"
    )
    parser.add_argument(
        "--normalise-as",
        type=Path,
        metavar="PATH",
        help="normalise values with the statistics of these samples (default: those of the training run)",
    )


def _add_windows(parser: argparse.ArgumentParser) -> None:
    """Add the distribution of samples over ranks, and their division into windows."""
    parser.add_argument(
        "--grid",
        type=grid_shape,
        metavar="n=2,h=2",
        help="process grid (default: all ranks along h, or along w for sequences)",
    )
    parser.add_argument(
        "--batch", type=positive_int, default=1, help="samples or windows per forward pass (default: %(default)s)"
    )
    parser.add_argument(
        "--window",
        type=grid_shape,
        metavar="h=256,w=256",
        help="predict large samples window by window, with windows of this size (default: full samples)",
    )
    parser.add_argument(
        "--overlap",
        type=fraction_below_one,
        default=0.25,
        metavar="FRACTION",
        help="fraction of a window that overlaps with the next one (default: %(default)s)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    """Add the form of the predictions."""
    parser.add_argument("--raw", action="store_true", help="write the outputs of the network instead of probabilities")
    zarr = importlib.util.find_spec("zarr") is not None
    parser.add_argument(
        "--format",
        choices=("zarr", "h5", NIFTI),
        default="zarr" if zarr else "h5",
        help="file format of the predictions; nii.gz: a folder with a NIfTI volume for each sample (default: zarr if "
        "it is installed, else h5)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float64"),
        help="floating-point type (default: that of the training run, or float32)",
    )


def run(options: argparse.Namespace) -> int:
    """Predict, and write everything to ``options.out``. Collective over MPI.COMM_WORLD."""
    comm = MPI.COMM_WORLD
    options.device = select_device(options.device, comm)
    trained = find_network(options.weights, comm)
    if labelled.is_labelled(trained, options.data):
        path, group, outcome = labelled.predict(options, trained, options.device, comm)
        results = {"group": group, "accuracy": outcome.accuracy, "loss": outcome.loss}
        _write_summary(options, trained, comm, results, [f"{group} accuracy: {outcome}", f"predictions: {path}"])
        return 0
    with closing(open_inputs(options, trained, comm)) as inputs:
        dtype = getattr(torch, options.dtype or trained.settings.get("dtype", "float32"))
        field = loader_field(options, trained, inputs, dtype)
        grid = _grid(options, comm, len(inputs.shape))
        model = build_network(trained, comm, channels=inputs.shape[1], options=options)
        path = PredictionRun(
            options, trained, inputs, field, grid, distribute_network(trained, model, grid, options.device, dtype)
        ).write()
        scores = None if options.raw else score(path, inputs, grid, trained.notes.get("ignore"))
        title, figure = f"{trained.path} on {options.data}, grid {grid.describe()}", options.out / "result.png"
        lines = [str(scores) if scores else "no scores: there are no labels"]
        drawn = try_on_all_ranks(
            comm,
            lambda: draw_figure(figure, lambda: draw(figure, path, inputs, title)) if comm.rank == 0 else "",
            DataError,
        )
        _write_summary(
            options, trained, comm, scores.results if scores else {}, [*lines, drawn, f"predictions: {path}"]
        )
    return 0


def _grid(options: argparse.Namespace, comm: MPI.Intracomm, dimensions: int) -> ProcessGrid:
    grid = options.grid or {"w" if dimensions == 3 else "h": comm.size}
    useless = [axis for axis in grid if axis in "dhw"[: 5 - dimensions] and grid[axis] > 1]
    if useless:
        raise GridError(f"--grid: the samples have no axis {useless[0]}. Use axes of the samples.")
    return ProcessGrid(comm, **grid)


def _write_summary(
    options: argparse.Namespace, trained: TrainedNetwork, comm: MPI.Intracomm, results: dict[str, Any], lines: list[str]
) -> None:
    """Write summary.json and print the paths of all results, on rank 0. Collective."""
    peaks = comm.gather(peak_memory_bytes(), root=0)

    def conclude() -> None:
        if peaks is None:
            return
        summary: dict[str, Any] = {"weights": str(trained.path), "task": trained.task, "data": str(options.data)}
        summary |= {**results, "ranks": comm.size, "peak_memory_bytes": peaks}
        write_file(options.out / SUMMARY, json.dumps(summary, indent=1) + "\n")
        print("\n".join(lines))

    try_on_all_ranks(comm, conclude, DataError)
