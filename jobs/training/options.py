"""Command-line options shared by all training jobs, and their conversion.

Options become a grid or plan, a device and settings. Other commands use the parsers of numbers, too.
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import torch
from mpi4py import MPI

from distconv.arrangement import parse_grid
from distconv.batch_norm_scope import BATCH_NORM_SCOPES
from distconv.communication.agreement import try_on_all_ranks
from distconv.errors import GridError, UnsupportedOperation
from distconv.grid import ProcessGrid
from distconv.jobs.captured_steps import CHOICES
from distconv.jobs.configuration.optimisation import optimizer_name, scheduler_name
from distconv.jobs.configuration.options_file import add_config_arguments, parse_mapping
from distconv.jobs.configuration.tracking import TRACKERS
from distconv.local_device import device
from distconv.parameters.sharded_axes import parse_weight_axes
from distconv.plan import Plan

from .settings import TrainingSettings

S = TypeVar("S", bound=TrainingSettings)


def add_training_arguments(
    parser: argparse.ArgumentParser, defaults: TrainingSettings, out: str
) -> argparse._MutuallyExclusiveGroup:
    """Add all options but those of the data, the model's name and the augmentation.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Parser of the command.
    defaults : TrainingSettings
        Default values.
    out : str
        Default of ``--out``.

    Returns
    -------
    argparse._MutuallyExclusiveGroup
        Group of ``--grid`` and ``--plan``, to which a command may add pipelines.
    """
    width = defaults.width or "the model's own"
    parser.add_argument(
        "--width", type=positive_int, default=defaults.width, help=f"channels of the model (default: {width})"
    )
    container = parser.add_mutually_exclusive_group()
    container.add_argument(
        "--grid",
        type=grid_shape,
        metavar="n=2,h=2",
        help="process grid (default: along n as many ranks as divide the batch, the others along h)",
    )
    container.add_argument(
        "--plan", metavar="PLAN.json", help="plan file with the distribution of each layer, as distconv plan writes it"
    )
    parser.add_argument(
        "--batch", type=positive_int, default=defaults.batch, help="samples per step (default: %(default)s)"
    )
    parser.add_argument(
        "--epochs", type=positive_int, default=defaults.epochs, help="number of training epochs (default: %(default)s)"
    )
    parser.add_argument("--steps", type=positive_int, help="number of training steps, instead of --epochs")
    _add_optimizer(parser, defaults)
    _add_gradients(parser)
    _add_learning_rate(parser, defaults)
    _add_numerics(parser, defaults)
    add_device_argument(parser)
    parser.add_argument(
        "--seed",
        type=nonnegative_int,
        default=defaults.seed,
        help="seed of the weights, the order of samples and the augmentation (default: %(default)s)",
    )
    parser.add_argument(
        "--drop-last", action="store_true", help="skip the last batch of an epoch if it is smaller than the others"
    )
    _add_run(parser, out)
    return container


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--readers``, the number of reading processes per rank."""
    parser.add_argument(
        "--readers",
        type=positive_int,
        default=1,
        metavar="N",
        help="processes that read samples on each rank (default: one thread)",
    )


def _add_optimizer(parser: argparse.ArgumentParser, defaults: TrainingSettings) -> None:
    """Add the classes of the optimizer and of its scheduler, with their arguments."""
    parser.add_argument(
        "--optimizer",
        type=optimizer_name,
        default=defaults.optimizer,
        metavar="NAME",
        help="optimizer: sgd, adam, adamw or another class of torch.optim (default: %(default)s)",
    )
    parser.add_argument(
        "--optimizer-args",
        type=parse_mapping,
        default={},
        metavar="{NAME: VALUE}",
        help="further arguments of the optimizer, as YAML",
    )
    parser.add_argument(
        "--scheduler",
        type=scheduler_name,
        default=defaults.scheduler,
        metavar="NAME",
        help="learning rate scheduler: a class of torch.optim.lr_scheduler (default: a linear warm-up, then half "
        "a cosine)",
    )
    parser.add_argument(
        "--scheduler-args",
        type=parse_mapping,
        default={},
        metavar="{NAME: VALUE}",
        help="arguments of the scheduler, as YAML; the number of steps and the maximum learning rate (--lr) are "
        "passed without them",
    )


def _add_gradients(parser: argparse.ArgumentParser) -> None:
    """Add the treatment of gradients before a step, and of weights after it."""
    parser.add_argument(
        "--clip-norm",
        type=positive_float,
        metavar="NORM",
        help="clip the norm of all gradients at NORM (default: no clipping)",
    )
    parser.add_argument(
        "--accumulate",
        type=positive_int,
        default=1,
        metavar="N",
        help="split each mini-batch into N equal parts and add up their gradients (default: %(default)s)",
    )
    parser.add_argument(
        "--ema",
        type=fraction_below_one,
        metavar="DECAY",
        help="keep an exponential moving average of the weights with this decay; evaluation, prediction and "
        "export use it (default: none)",
    )


def _add_learning_rate(parser: argparse.ArgumentParser, defaults: TrainingSettings) -> None:
    """Add the learning rate, the momentum and the weight decay."""
    parser.add_argument(
        "--lr", type=positive_float, default=defaults.lr, help="peak learning rate (default: %(default)s)"
    )
    parser.add_argument(
        "--warm-up",
        type=fraction,
        default=defaults.warm_up,
        metavar="FRACTION",
        help="fraction of the steps over which the learning rate rises to its peak (default: %(default)s)",
    )
    parser.add_argument(
        "--momentum",
        type=nonnegative_float,
        default=defaults.momentum,
        help="momentum of the optimizer sgd (default: %(default)s)",
    )
    parser.add_argument(
        "--weight-decay",
        type=nonnegative_float,
        default=defaults.weight_decay,
        help="weight decay of sgd, adam and adamw; pass that of others by --optimizer-args (default: %(default)s)",
    )


def _add_numerics(parser: argparse.ArgumentParser, defaults: TrainingSettings) -> None:
    """Add the options of dtype, precision, batch-norm scope and sharding of weights and of the optimizer."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "float64"),
        default=defaults.dtype,
        help="floating-point type of weights and computation (default: %(default)s)",
    )
    parser.add_argument(
        "--precision",
        choices=("full", "bf16"),
        default=defaults.precision,
        help="bf16: convolutions and matrix products in bfloat16 (torch.autocast); weights, gradients and the "
        "loss stay in float32 (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-norm",
        choices=BATCH_NORM_SCOPES,
        help="batch-norm statistics: over the mini-batch, over the ranks that share the same samples, or over "
        "each rank's block (default: the plan's, or global)",
    )
    parser.add_argument(
        "--shard-optimizer",
        action="store_true",
        help="split the optimizer state over the ranks with the same weights",
    )
    add_shard_weights_argument(parser, "the plan's, or none")


def add_shard_weights_argument(parser: argparse._ActionsContainer, default: str, *more: str) -> None:
    """Add ``--shard-weights``, whose value is None or one for :func:`.parallelize`, or from ``more``.

    Parameters
    ----------
    parser : argparse.ArgumentParser
    default : str
        The default, in words.
    *more : str
        Further values.
    """
    also = "".join(f", {value}" for value in more)

    def sharding(text: str) -> str | bool:
        return text if text in more else sharded_weights(text)

    parser.add_argument(
        "--shard-weights",
        type=sharding,
        metavar="|".join(("all", "none", *more, "n,h")),
        help="axes over which weights, their gradients and optimizer state are split; layers gather their weights "
        f"before they use them: all, none{also}, or axes such as n or n,h (default: {default})",
    )


def sharded_weights(text: str) -> str | bool:
    """Parse ``--shard-weights``: ``all``, ``none`` or axes such as ``n,h``.

    Raises
    ------
    ArgumentTypeError
        If the string is neither.
    """
    if text in ("all", "none"):
        return text == "all"
    try:
        parse_weight_axes(text, "--shard-weights")
    except UnsupportedOperation as error:
        raise argparse.ArgumentTypeError(f"{error}; use all, none, or axes such as n,h") from None
    return text


def _add_run(parser: argparse.ArgumentParser, out: str) -> None:
    """Add the options of the run: folder, start, tracking, checkpoints, capture, checks and traces."""
    add_config_arguments(parser)
    parser.add_argument(
        "--init-from", type=Path, metavar="FILE", help="initialize the weights from a file (.pt or .safetensors)"
    )
    parser.add_argument("--track", choices=TRACKERS, help="log the numbers of metrics.jsonl to this tracker, too")
    parser.add_argument(
        "--out", type=Path, default=Path(out), metavar="DIR", help="output folder (default: %(default)s)"
    )
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument(
        "--resume",
        nargs="?",
        choices=("newest", "whole"),
        const="newest",
        metavar="whole",
        help="resume from the newest checkpoint in --out, possibly with more --epochs or --steps; whole: from the "
        "newest checkpoint that is not damaged",
    )
    earlier.add_argument("--overwrite", action="store_true", help="delete the run in --out, if there is one")
    parser.add_argument(
        "--checkpoint-every",
        type=nonnegative_int,
        default=200,
        metavar="STEPS",
        help="save a checkpoint every STEPS steps; 0: never (default: %(default)s)",
    )
    parser.add_argument(
        "--capture",
        choices=CHOICES,
        help="record training steps once and replay them, with bit-identical results (docs/how-to/capture-steps.md); "
        "auto: if a replay is faster (default: auto for reference models, off for other models and with --trace)",
    )
    parser.add_argument(
        "--check-replicas-every",
        type=positive_int,
        metavar="STEPS",
        help="compare the weights of replicas every STEPS steps, and exit with an error if they differ (default: "
        "never)",
    )
    parser.add_argument(
        "--trace",
        type=step_range,
        metavar="FIRST:END",
        help="trace the steps from FIRST up to, but not including, END into --out/trace, and print where their "
        "time went",
    )


def step_range(text: str) -> range:
    """Parse a range of steps, such as ``10:13`` for steps 10, 11 and 12.

    Raises
    ------
    ArgumentTypeError
        If the string is not valid.
    """
    first, colon, end = text.partition(":")
    if not (colon and first.isdigit() and end.isdigit() and 0 < int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range FIRST:END of steps counted from 1, such as 10:13")
    return range(int(first), int(end))


def grid_shape(text: str) -> dict[str, int]:
    """Parse the axes and sizes of a grid, such as ``n=2,h=2``.

    Raises
    ------
    ArgumentTypeError
        If the string is not valid.
    """
    try:
        return parse_grid(text)
    except GridError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive_int(text: str) -> int:
    """Parse an integer above zero.

    Raises
    ------
    ArgumentTypeError
        If the string is not valid.
    """
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def nonnegative_int(text: str) -> int:
    """Parse an integer that is not negative.

    Raises
    ------
    ArgumentTypeError
        If the string is not valid.
    """
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a non-negative integer")
    return int(text)


def positive_float(text: str) -> float:
    """Parse a finite number above zero.

    Raises
    ------
    ArgumentTypeError
        If the string is not valid.
    """
    if not _number(text) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return _number(text)


def nonnegative_float(text: str) -> float:
    """Parse a finite number that is not negative.

    Raises
    ------
    ArgumentTypeError
        If the string is not valid.
    """
    if not _number(text) >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a non-negative number")
    return _number(text)


def fraction(text: str) -> float:
    """Parse a number from 0 to 1, both included.

    Raises
    ------
    ArgumentTypeError
        If the string is not valid.
    """
    if not 0 <= _number(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return _number(text)


def fraction_below_one(text: str) -> float:
    """Parse a number from 0 to 1, without 1.

    Raises
    ------
    ArgumentTypeError
        If the string is not valid.
    """
    if not 0 <= _number(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0 and below 1")
    return _number(text)


def _number(text: str) -> float:
    """Return the number, or NaN if the string is not a finite number."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def settings_from_options(options: argparse.Namespace, kind: type[S]) -> S:
    """Make the settings from the parsed options.

    Parameters
    ----------
    options : argparse.Namespace
        Options of :func:`add_training_arguments` and of the command.
    kind : type
        Class of the settings.

    Returns
    -------
    TrainingSettings
        Instance of ``kind``, with contiguous memory. Without ``--batch-norm`` its ``batch_norm`` is ``global``.
    """
    values = {field.name: getattr(options, field.name) for field in fields(kind) if field.name != "memory_format"}
    # make_in_memory_format replaces the memory format.
    return kind(**values | {"batch_norm": options.batch_norm or "global", "memory_format": "contiguous"})


def parallelism_from_options(
    options: argparse.Namespace, comm: MPI.Intracomm, rest_along: str = "h"
) -> ProcessGrid | Plan:
    """Return the plan or grid of the options, or a default grid. Collective: call on every rank.

    The batch-norm scope of a plan is stored in ``options.batch_norm`` unless the option is given. Call it before
    :func:`settings_from_options`.

    Parameters
    ----------
    options : argparse.Namespace
        Options of the command.
    comm : mpi4py.MPI.Intracomm
    rest_along : str
        Axis of the remaining ranks in :func:`default_grid`.

    Returns
    -------
    ProcessGrid or Plan
    """
    if options.plan is not None:
        plan = Plan.load(options.plan, comm)
        options.batch_norm = options.batch_norm or plan.batch_norm
        return plan
    part = max(1, options.batch // options.accumulate)
    return ProcessGrid(comm, **(options.grid or default_grid(comm.size, part, rest_along)))


def default_grid(ranks: int, batch: int, rest_along: str = "h") -> dict[str, int]:
    """Return a grid with as many ranks along ``n`` as divide the batch, and the remaining ones along another axis.

    Parameters
    ----------
    ranks : int
    batch : int
        Samples whose gradients are computed at a time.
    rest_along : str
        Axis of the remaining ranks.

    Returns
    -------
    dict of str to int
        Size of each axis.

    Examples
    --------
    >>> default_grid(8, 4)
    {'n': 4, 'h': 2}
    """
    along_n = math.gcd(ranks, batch)
    return {"n": along_n, rest_along: ranks // along_n}


def add_device_argument(parser: argparse.ArgumentParser, what: str = "device") -> None:
    """Add ``--device``.

    Parameters
    ----------
    parser : argparse.ArgumentParser
    what : str
        Beginning of its help.
    """
    parser.add_argument(
        "--device",
        type=device_name,
        metavar="cpu|cuda|cuda:N",
        help=f"{what}: cpu, cuda (each rank uses a GPU of its node, assigned round-robin) or cuda:N (all ranks use "
        "this GPU) (default: cuda if there is a GPU, else cpu)",
    )


def device_name(text: str) -> str:
    """Check a device name: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises
    ------
    ArgumentTypeError
        If the string is not a device name.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not cpu, cuda or cuda:N")
    return text


def select_device(name: str | None, comm: MPI.Intracomm) -> str:
    """Select the device of this rank and make a GPU torch's current device. Collective: call on every rank.

    Parameters
    ----------
    name : str or None
        Value of ``--device``. None: a GPU if there is one.
    comm : mpi4py.MPI.Intracomm

    Returns
    -------
    str
        The device, such as ``cuda:1``.

    Raises
    ------
    GridError
        On all ranks, if one of them does not have the GPU.
    """
    return try_on_all_ranks(comm, lambda: str(_find_device(name)), GridError)


def _find_device(name: str | None) -> torch.device:
    if name == "cpu":
        return torch.device(name)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None or (name == "cuda" and gpus):
        return device()
    wanted = torch.device(name)
    if wanted.index is None or wanted.index >= gpus:
        there = f"the last GPU of this machine is cuda:{gpus - 1}" if gpus else "this machine has no CUDA device"
        raise GridError(f"--device {name}: {there}; use --device {'cuda' if gpus else 'cpu'}")
    torch.cuda.set_device(wanted)
    return wanted
