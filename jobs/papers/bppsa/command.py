"""Reproduce BPPSA's tables and figures: sparse Jacobians, FLOP of a pruned VGG-11, ranks to win, training.

For steps of recurrent networks with other shapes, see ``distconv bench scan``.

Source: "BPPSA: Scaling back-propagation by parallel scan algorithm", tables 1 and 4 to 6, figures 6, 10, 12, 13, 3.6.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from mpi4py import MPI

from distconv.errors import DataError
from distconv.jobs.papers.bppsa import (
    adam_staleness,
    epochs,
    jacobian_table,
    pruned_vgg,
    ranks_to_win,
    sound_curves,
    training,
)
from distconv.jobs.papers.printed_tables import Rows, add_json_argument, print_tables
from distconv.jobs.training.options import add_device_argument, positive_float, positive_int, select_device

EXAMPLES = """\
examples:
  distconv reproduce bppsa
  distconv reproduce bppsa table-1 --columns 256
  distconv reproduce bppsa figure-10 --prune 0.9
  distconv reproduce bppsa figure-10 --data cifar10 --width 16 --iterations 400 --batch 64
  distconv reproduce bppsa figure-6 --data cifar10 --iterations 100
  distconv reproduce bppsa figure-12 --data cifar10 --width 16 --iterations 600 --batch 32
  distconv reproduce bppsa table-6 figure-13 --sounds fsdd_8k.h5
"""

NEEDED = {"figure-6": "data", "figure-12": "data", "figure-13": "sounds"}
"""Parts that require data, and the option that names the data."""
PARTS = ("table-1", "figure-10", "ranks", *epochs.TABLES, *NEEDED)
"""Names of all parts, in the order in which they are printed by default."""

CASES = [(1000, 20, 1), (1000, 20, 16), (30000, 20, 1), (30000, 20, 16), (30000, 128, 16)]
"""Steps, width and batch of each row of the part ``ranks``: the paper's RNN (4.1), and a wider one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv reproduce bppsa``."""
    parser.add_argument(
        "parts",
        type=_part,
        nargs="*",
        metavar="PART",
        help=f"tables and figures: {', '.join(PARTS)} (default: all whose data are given)",
    )
    parser.add_argument(
        "--columns",
        type=positive_int,
        default=64,
        help="Jacobian columns that autograd is timed on, in table-1 (default: %(default)s)",
    )
    parser.add_argument(
        "--prune",
        type=_fraction,
        default=0.97,
        metavar="FRACTION",
        help="pruned fraction of the weights, in figure-10 (default: %(default)s)",
    )
    parser.add_argument(
        "--width",
        type=positive_int,
        default=64,
        help="channels of VGG's first layer, in figures 10 and 12 (default: %(default)s)",
    )
    parser.add_argument(
        "--machines",
        nargs="+",
        default=["localhost", "lassen", "h200-node"],
        help="machines, built-in names or files (default: localhost lassen h200-node)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="folder of CIFAR-10 or a similar data set, for figures 6 and 12 and for training before figure 10",
    )
    parser.add_argument("--sounds", type=Path, metavar="PATH", help="HDF5 file or folder of sounds, for figure 13")
    parser.add_argument(
        "--epochs", type=positive_int, default=5, help="training epochs of figure 13 (default: %(default)s)"
    )
    parser.add_argument(
        "--iterations",
        type=positive_int,
        default=40,
        help="training iterations of figures 6, 10 and 12 (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=positive_int,
        default=256,
        help="samples per training iteration of figures 6, 10 and 12 (default: %(default)s)",
    )
    parser.add_argument(
        "--rate",
        type=positive_float,
        help=f"learning rate of SGD (default: {training.RATE}, in figure 10 {pruned_vgg.RATE})",
    )
    add_device_argument(parser, "device of tables 4 to 6")
    add_json_argument(parser)


def _part(text: str) -> str:
    if text not in PARTS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid part. Use one of {', '.join(PARTS)}.")
    return text


def _fraction(text: str) -> float:
    fraction = float(text)
    if not 0 <= fraction < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return fraction


def run(options: argparse.Namespace) -> int:
    """Print the tables on rank 0. Collective over MPI.COMM_WORLD.

    Raises
    ------
    DataError
        If a part is requested without its data.
    """
    for part, option in NEEDED.items():
        if part in options.parts and getattr(options, option) is None:
            raise DataError(f"{part}: no data given. Name a folder or file of samples with --{option}.")
    device = torch.device(select_device(options.device, MPI.COMM_WORLD))
    print_tables(lambda: _tables(options, device), options.json)
    return 0


def _tables(options: argparse.Namespace, device: torch.device) -> dict[str, Rows]:
    parts = options.parts or [x for x in PARTS if x not in NEEDED or getattr(options, NEEDED[x]) is not None]
    # With data, figure 10 prunes a trained network. Otherwise it prunes random weights.
    recipe = None
    if options.data is not None:
        rate = options.rate or pruned_vgg.RATE
        recipe = pruned_vgg.PrunedVggRecipe(options.data, options.iterations, options.batch, rate)
    make: dict[str, Callable[[], Rows]] = {
        "table-1": lambda: jacobian_table.table(options.columns),
        "figure-10": lambda: pruned_vgg.table(options.prune, options.width, recipe=recipe),
        "ranks": lambda: ranks_to_win.table(options.machines, CASES),
        "figure-6": lambda: training.table(
            options.data, options.iterations, options.batch, options.rate or training.RATE
        ),
        "figure-12": lambda: adam_staleness.table(options.data, options.iterations, options.batch, options.width),
        "figure-13": lambda: sound_curves.table(options.sounds, options.epochs),
        **{name: partial(epochs.table, name, rows, device) for name, rows in epochs.TABLES.items()},
    }
    return {part: make[part]() for part in parts}
