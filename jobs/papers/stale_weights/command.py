"""Measure the accuracy of training with stale weights and without a pipeline, for several seeds.

One process simulates the pipeline, with one thread. A variant is ``nonpipelined``, the layers that pipeline registers
follow (``7,13``), ``hybrid:7,13``, pipelined for two thirds of the iterations, or ``stash:7,13``, whose backward passes
use the weights of their forward passes; ``@RATE`` sets another learning rate. Each finished run is a line of the
results file and is not repeated: an interrupted experiment resumes if it is started again. Initial weights, the order
of the samples and their augmentation depend on the seed only and are the same in all variants.

Source: stale weights (Zhang, Abdelrahman 2021), 5 (simulated implementation), 6.2 to 6.4, appendix A.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
from mpi4py import MPI

from distconv.errors import DataError
from distconv.jobs.images.samples import ImageSamples
from distconv.jobs.planning.options import run_on_rank_0
from distconv.jobs.training.options import nonnegative_int, positive_int
from distconv.jobs.training.report import draw_figure
from distconv.layers.models import MODELS
from distconv.pipeline import split

from .picture import draw
from .recipes import MOMENTUM, RECIPES, TrainingVariant
from .table import FinishedRuns, rows_of, table
from .training import TrainingRun, build, held_out, train

EXAMPLES = """\
examples:
  distconv reproduce stale-weights lenet5 --data mnist
  distconv reproduce stale-weights resnet20 --data cifar10 --width 8 --seeds 0 1 2
  distconv reproduce stale-weights resnet20 --data cifar10 --variants nonpipelined 7,13@0.05 hybrid:7,13
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv reproduce stale-weights``."""
    parser.add_argument("network", choices=RECIPES, help="network to train")
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="PATH",
        help="folder of MNIST or CIFAR-10, or an HDF5 file of images",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="file that results are appended to (default: runs/staleness/NETWORK.jsonl)",
    )
    parser.add_argument(
        "--variants", nargs="+", metavar="VARIANT", help="variants to train, as described above (default: the recipe's)"
    )
    parser.add_argument(
        "--seeds",
        type=nonnegative_int,
        nargs="+",
        default=[0, 1, 2],
        metavar="N",
        help="random seeds, one run for each (default: 0 1 2)",
    )
    parser.add_argument(
        "--iterations", type=positive_int, metavar="N", help="training iterations (default: the recipe's)"
    )
    parser.add_argument(
        "--schedule",
        type=positive_int,
        metavar="N",
        help="iterations over which the learning rate decays (default: --iterations)",
    )
    parser.add_argument("--batch", type=positive_int, metavar="N", help="samples per iteration (default: the recipe's)")
    parser.add_argument(
        "--width", type=positive_int, metavar="N", help="channels of the model (default: the model's own)"
    )
    parser.add_argument(
        "--evaluations",
        type=positive_int,
        default=6,
        metavar="N",
        help="evaluations on the test images in each run (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Train the missing runs, print the table and draw the figure, all on rank 0. Collective over MPI.COMM_WORLD."""
    threads = torch.get_num_threads()
    # The order of sums depends on the number of threads, which is not among the settings of a stored run.
    torch.set_num_threads(1)
    try:
        run_on_rank_0(MPI.COMM_WORLD, lambda: _experiment(options))
    finally:
        torch.set_num_threads(threads)
    return 0


def _experiment(options: argparse.Namespace) -> None:
    results = FinishedRuns(options.results or Path("runs/staleness") / f"{options.network}.jsonl")
    with closing(ImageSamples(options.data, MPI.COMM_SELF)) as samples:
        runs = runs_of(options, samples)
        print(_settings(runs[0]), flush=True)
        make(runs, results, samples, options.evaluations)
    rows = rows_of(results, runs)
    print(table(rows))
    path = results.path.with_suffix(".png")
    print(draw_figure(path, lambda: draw(path, rows, _settings(runs[0]))))


def runs_of(options: argparse.Namespace, samples: ImageSamples) -> list[TrainingRun]:
    """Return all requested runs: all variants for the first seed, then for the next.

    In this order an interrupted experiment has complete comparisons for the seeds that have finished.

    Parameters
    ----------
    options : argparse.Namespace
        Options of the command.
    samples : ImageSamples

    Returns
    -------
    list of TrainingRun

    Raises
    ------
    DataError
        If the images are too small for the network, or ``--schedule`` is shorter than ``--iterations``.
    VariantError
        If a variant is not valid.
    """
    recipe, least = RECIPES[options.network], MODELS[options.network].sample[1:]
    iterations = options.iterations or recipe.iterations
    schedule = options.schedule or iterations
    if schedule < iterations:
        raise DataError(
            f"--schedule {schedule}: fewer than the {iterations} training iterations. Use at least as many."
        )
    if any(extent < needed for extent, needed in zip(samples.extents[1:], least, strict=True)):
        raise DataError(
            f"--data {options.data}: images of {samples.extents}, but {options.network} needs {least} or more. Use "
            "larger images or another network."
        )
    counts = {group: len(samples.groups[group].labels) if group in samples.groups else 0 for group in ("train", "test")}
    return [
        TrainingRun(
            options.network,
            options.width,
            str(TrainingVariant.parse(variant)),
            each,
            iterations,
            schedule,
            options.batch or recipe.batch,
            options.data.resolve().name,
            **counts,
        )
        for each in options.seeds
        for variant in options.variants or recipe.variants
    ]


def make(runs: Sequence[TrainingRun], results: FinishedRuns, samples: ImageSamples, evaluations: int) -> None:
    """Train the runs that have no results yet. Prints the result of each, and the remaining time.

    Parameters
    ----------
    runs : sequence of TrainingRun
    results : FinishedRuns
    samples : ImageSamples
    evaluations : int
        Evaluations on the test images in each run.
    """
    missing = [run for run in dict.fromkeys(runs) if results.of(run) is None]
    # Each variant is split once before the first run: a layer that the network does not have is an error now, not after
    # hours of training.
    for run in {run.variant: run for run in missing}.values():
        split(build(run, samples), TrainingVariant.parse(run.variant).placement)
    print(f"{len(missing)} of {len(runs)} runs are to be made")
    test = held_out(samples)
    seconds: list[float] = []
    for run in missing:
        result = train(run, samples, test, evaluations)
        results.add(run, result)
        seconds.append(result["seconds"])
        rest = statistics.mean(seconds) * (len(missing) - len(seconds)) / 60
        end = f", DIVERGED at iteration {result['diverged_at']}" if result["diverged_at"] else ""
        print(
            f"seed {run.seed}, {run.variant}: {100 * result['accuracy']:.2f} % after {result['seconds']:.0f} s{end}; "
            f"about {rest:.0f} min for the others",
            flush=True,
        )


def _settings(run: TrainingRun) -> str:
    recipe = RECIPES[run.network]
    return (
        f"{run.network}{f' of width {run.width}' if run.width else ''} on {run.data} ({run.train} images, {run.test} "
        f"to test), {run.iterations} iterations (the paper: {recipe.paper_iterations}) of {run.batch},\n"
        f"SGD, momentum {MOMENTUM:g}{' (Nesterov)' if recipe.nesterov else ''}, weight decay {recipe.weight_decay:g}, "
        f"rate {recipe.rate:g}, pipelined {recipe.pipelined_rate:g}, falls {recipe.falls_in_words} of {run.schedule}, "
        f"augmentation: {recipe.augment or 'none'}"
    )
