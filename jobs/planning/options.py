"""Options and helpers of the commands that plan.

They cover network, machine and ranks, and work on some ranks while the others sleep. Other commands and benchmarks use
them, too.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from mpi4py import MPI

from distconv.communication.agreement import try_on_all_ranks
from distconv.errors import DataError, DistconvError, PlanError
from distconv.jobs.planning.package_memory import build_and_measure
from distconv.jobs.training.model_factory import ModelError, build_model
from distconv.jobs.training.options import positive_int
from distconv.layers.models import MODELS
from distconv.memory_format import FORMATS
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.graph.tracing import TraceError, trace
from distconv.perfmodel.machine.machine import built_in
from distconv.perfmodel.machine.step_mode import StepMode
from distconv.perfmodel.machine.units import Quantity

T = TypeVar("T")

AT_MOST = "at-most:"
"""Prefix of a value of ``--ranks`` that is a maximum."""

POLL_S = 0.002
"""Seconds between the checks of a sleeping rank for the end of the others' work."""


def add_network_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the options of the network and its mini-batch.

    Parameters
    ----------
    parser : argparse.ArgumentParser
    required : bool
        True if the command needs them.
    """
    parser.add_argument(
        "--model",
        required=required,
        metavar="NAME",
        help=f"network: {', '.join(MODELS)}, or your own as package.module:factory",
    )
    parser.add_argument("--width", type=positive_int, help="channels of the model (default: the model's own)")
    parser.add_argument(
        "--classes", type=positive_int, help="classes or output channels of the model (default: the model's own)"
    )
    parser.add_argument(
        "--input", type=sample_shape, required=required, metavar="C,H,W", help="shape of one sample, channels first"
    )
    parser.add_argument("--batch", type=positive_int, required=required, metavar="N", help="samples per step")


def add_machine_argument(parser: argparse.ArgumentParser, *, required: bool, more: str = "") -> None:
    """Add ``--machine``, the machine of the predictions; its help begins with ``more``.

    Parameters
    ----------
    parser : argparse.ArgumentParser
    required : bool
        True if the command needs it.
    more : str
        Further machines in the help.
    """
    parser.add_argument(
        "--machine",
        required=required,
        metavar="NAME|FILE",
        help=f"machine: {more}{', '.join(built_in())}, or a file such as ./mine.yaml",
    )


def add_step_mode_arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add ``--memory-format`` and ``--captured``.

    Parameters
    ----------
    parser : argparse.ArgumentParser
    verb : str
        What the command does with steps, for the help.
    """
    parser.add_argument(
        "--memory-format",
        choices=FORMATS,
        default=FORMATS[0],
        help=f"{verb} steps whose images and weights have this memory format (default: %(default)s)",
    )
    parser.add_argument("--captured", action="store_true", help=f"{verb} captured steps instead of eager ones")


def step_mode(options: argparse.Namespace) -> StepMode:
    """Return the mode that the options of :func:`add_step_mode_arguments` select."""
    return StepMode(options.memory_format, options.captured)


def sample_shape(text: str) -> tuple[int, ...]:
    """Parse the shape of a sample, such as ``3,224,224``.

    Raises
    ------
    ArgumentTypeError
        If the string is not a shape.
    """
    try:
        return tuple(positive_int(word) for word in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the shape of a sample, channels first, such as 3,224,224"
        ) from None


@dataclass(frozen=True)
class RankOption:
    """Value of ``--ranks``: an exact or a maximum number of ranks."""

    count: int
    at_most: bool = False
    """True permits fewer ranks than ``count``. Otherwise ``count`` is exact."""


def rank_option(text: str) -> RankOption:
    """Parse ``--ranks``, such as ``64`` or ``at-most:64``.

    Raises
    ------
    ArgumentTypeError
        If the string is neither.
    """
    return RankOption(positive_int(text.removeprefix(AT_MOST)), text.startswith(AT_MOST))


def add_ranks_argument(container: argparse._ActionsContainer, *, required: bool = True) -> None:
    """Add ``--ranks``.

    Parameters
    ----------
    container : argparse.ArgumentParser
        Parser or group of options.
    required : bool
        True if the command needs it.
    """
    container.add_argument(
        "--ranks",
        type=rank_option,
        required=required,
        metavar="64|at-most:64",
        help="number of ranks that will train; at-most:N chooses the fastest number up to N",
    )


class TimedPlan(Protocol):
    """A result with a predicted time."""

    @property
    def time(self) -> float:
        """Seconds per step."""

    @property
    def estimated(self) -> bool:
        """True if the machine has measured times, but not of all layers. Otherwise it has all of them, or none."""


S = TypeVar("S", bound=TimedPlan)


def choose_rank_count(plan: Callable[[int], S], wanted: RankOption) -> tuple[int, S, str]:
    """Select the number of ranks.

    The number is halved as long as that is faster. A measured time is not compared with an estimate. For an exact
    number of ranks, faster plans on fewer ranks only lead to a remark.

    Parameters
    ----------
    plan : callable
        Returns the plan for a number of ranks. May raise PlanError for fewer ranks than wanted.
    wanted : RankOption
        Value of ``--ranks``.

    Returns
    -------
    (int, S, str)
        Number of ranks, its plan, and remarks: that fewer ranks are faster, or were not compared. They may be empty.
    """
    count, best = wanted.count, plan(wanted.count)
    first, remarks = best, []
    while count > 1:
        try:
            fewer = plan(count // 2)
        except PlanError:
            break
        if fewer.estimated != best.estimated:
            kinds = ("measured", "estimated by the roofline")
            remarks.append(
                f"fewer ranks than {count} were not compared: times of layers are {kinds[best.estimated]} on {count} "
                f"and {kinds[fewer.estimated]} on {count // 2}; measure both with distconv profile"
            )
            break
        if not fewer.time < best.time:
            break
        count, best = count // 2, fewer
    if wanted.at_most or count == wanted.count:
        return count, best, "\n".join(remarks)
    remarks.insert(
        0,
        f"fewer ranks are faster: {1e3 * best.time:.3f} ms on {count}, {1e3 * first.time:.3f} ms on "
        f"{wanted.count}; use --ranks {AT_MOST}{wanted.count} to take them",
    )
    return wanted.count, first, "\n".join(remarks)


def quantity_parser(kind: type[Quantity]) -> Callable[[str], float]:
    """Return a parser of a quantity with its unit, such as ``16GB``, into base units."""

    def read(text: str) -> float:
        try:
            return kind.decode(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not {error}") from None

    return read


def trace_network(options: argparse.Namespace, loss: Callable[[Any], torch.Tensor] | None = None) -> LayerGraph:
    """Trace the network of the options.

    Parameters
    ----------
    options : argparse.Namespace
        Options of :func:`add_network_arguments`.
    loss : callable, optional
        Loss of the network's output, traced with it.

    Returns
    -------
    LayerGraph

    Raises
    ------
    ModelError
        If there is no such network, or it does not accept the samples.
    TraceError
        If the network cannot be traced.
    """
    model = build_network(options)
    try:
        return trace(model, (options.batch, *options.input), loss=loss)
    except TraceError as error:
        reason = str(error.__cause__).split("\n")[0]
        if not isinstance(error.__cause__, (RuntimeError, ValueError)) or "meta" in reason:
            raise
        raise ModelError(
            f"--input {','.join(map(str, options.input))}: {options.model} does not accept samples of this "
            f"shape ({reason}). Give the shape of one sample, channels first, such as 3,224,224."
        ) from error


def build_network(options: argparse.Namespace) -> torch.nn.Module:
    """Build the network of the options. Each rank builds its own.

    Raises
    ------
    ModelError
        If there is no such network.
    """
    channels, classes, width = options.input[0], options.classes, options.width
    return build_and_measure(
        options.model,
        lambda: build_model(options.model, MPI.COMM_SELF, seed=0, in_channels=channels, classes=classes, width=width),
    )


def run_on_rank_0(comm: MPI.Intracomm, attempt: Callable[[], T]) -> T:
    """Run a function on rank 0 and return its result on all ranks. Collective: call on every rank of ``comm``.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    attempt : callable
        As in :func:`run_on_first_ranks`.

    Returns
    -------
    T
    """
    return run_on_first_ranks(comm, 1, attempt)


def run_on_first_ranks(comm: MPI.Intracomm, ranks: int, attempt: Callable[[], T]) -> T:
    """Run a function on the first ranks while the others sleep. Collective: call on every rank of ``comm``.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    ranks : int
        Number of ranks that run it.
    attempt : callable
        The function.

    Returns
    -------
    T
        The result of rank 0, on all ranks.

    Raises
    ------
    DistconvError
        On all ranks with the same message, if ``attempt`` raises it on any rank.
    """

    def attempted() -> T | None:
        try:
            return attempt() if comm.rank < ranks else None
        finally:  # Also after an error: the other ranks sleep in this barrier.
            barrier_without_polling(comm)

    # On the sleeping ranks ``attempted`` returns None, so all ranks take the result of rank 0.
    result: T = comm.bcast(try_on_all_ranks(comm, attempted, DistconvError))
    return result


def barrier_without_polling(comm: MPI.Intracomm) -> None:
    """Wait in a barrier without occupying a core: MPI's own would poll and slow down working ranks. Collective."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(POLL_S)


def check_writable(option: str, path: Path) -> None:
    """Check that a file can be written, before the work whose result it will hold.

    Parameters
    ----------
    option : str
        Name of the option in errors.
    path : pathlib.Path

    Raises
    ------
    DataError
        If no file can be written to ``path``.
    """
    if path.is_dir():
        raise DataError(f"{option} {path}: is a folder. Name a file.")
    if not path.parent.is_dir():
        raise DataError(f"{option} {path}: no such folder ({path.parent}). Create it first.")
    # A regular file is replaced by renaming, which needs permission for its folder; a device or pipe is opened itself.
    if not os.access(path if path.exists() and not path.is_file() else path.parent, os.W_OK):
        raise DataError(f"{option} {path}: no write permission")
