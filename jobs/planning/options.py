"""What commands have in common: options for a network and a machine, and work of some ranks while others sleep."""

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
from distconv.jobs.planning.package_memory import weighed
from distconv.jobs.training.model_factory import ModelError, build_model
from distconv.jobs.training.options import positive
from distconv.layers.models import MODELS
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.graph.tracing import TraceError, trace
from distconv.perfmodel.machine.machine import built_in
from distconv.perfmodel.machine.units import Quantity

T = TypeVar("T")

AT_MOST = "at-most:"

POLL_S = 0.002
"""How often a rank that sleeps looks whether the others are done."""


def add_network_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The network and its mini-batch."""
    parser.add_argument(
        "--model",
        required=required,
        metavar="NAME",
        help=f"{', '.join(MODELS)}; or your own as package.module:factory",
    )
    parser.add_argument("--width", type=positive, help="channels of the model (default: the model's own)")
    parser.add_argument("--classes", type=positive, help="what the model predicts (default: the model's own)")
    parser.add_argument(
        "--input", type=extents, required=required, metavar="C,H,W", help="extents of one sample, channels first"
    )
    parser.add_argument("--batch", type=positive, required=required, metavar="N", help="samples per step")


def add_machine_argument(parser: argparse.ArgumentParser, *, required: bool, more: str = "") -> None:
    """The machine that predictions are for; ``more`` is what else the command takes, for its help."""
    parser.add_argument(
        "--machine",
        required=required,
        metavar="NAME|FILE",
        help=f"{more}{', '.join(built_in())}, or a file such as ./mine.yaml",
    )


def extents(text: str) -> tuple[int, ...]:
    """Extents as they are written, ``3,224,224``.

    Raises
    ------
    ArgumentTypeError
        If the text is none.
    """
    try:
        return tuple(positive(word) for word in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the extents of a sample, channels first, such as 3,224,224"
        ) from None


@dataclass(frozen=True)
class RankOption:
    """``--ranks``: so many, or at most so many."""

    count: int
    at_most: bool = False


def ranks(text: str) -> RankOption:
    """``64`` or ``at-most:64``.

    Raises
    ------
    ArgumentTypeError
        If the text is neither.
    """
    return RankOption(positive(text.removeprefix(AT_MOST)), text.startswith(AT_MOST))


def add_ranks_argument(place: argparse._ActionsContainer, *, required: bool = True) -> None:
    """``--ranks`` of commands that plan."""
    place.add_argument(
        "--ranks",
        type=ranks,
        required=required,
        metavar="64|at-most:64",
        help="ranks that will train; at-most: as many of them as are fastest",
    )


class Timed(Protocol):
    """Has a predicted time."""

    @property
    def time(self) -> float:
        """Seconds per step."""

    @property
    def estimated(self) -> bool:
        """True if the machine has measured times, but not of all layers. Otherwise it has all of them, or none."""


S = TypeVar("S", bound=Timed)


def fastest(plan: Callable[[int], S], wanted: RankOption) -> tuple[int, S, str]:
    """The number of ranks to take, its plan, and a line about fewer ranks where they are faster than those.

    Looks at half as many ranks, and on as long as that is faster. With fewer ``plan`` may raise a PlanError. A measured
    time is not compared with an estimate: the line says so.
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
        f"fewer ranks are faster: {1e3 * best.time:.3f} ms on {count}, {1e3 * first.time:.3f} ms on {wanted.count}; "
        f"--ranks {AT_MOST}{wanted.count} takes those",
    )
    return wanted.count, first, "\n".join(remarks)


def quantity(kind: type[Quantity]) -> Callable[[str], float]:
    """Return a parser of a quantity with its unit, such as ``16GB``, into base units."""

    def read(text: str) -> float:
        try:
            return kind.decode(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not {error}") from None

    return read


def traced(options: argparse.Namespace, loss: Callable[[Any], torch.Tensor] | None = None) -> LayerGraph:
    """The graph of the network that :func:`add_network_arguments` asked for, and of its ``loss``, if there is one.

    Raises
    ------
    ModelError
        If there is no such network, or it does not take such samples.
    TraceError
        If its layers cannot be found out.
    """
    model = built(options)
    try:
        return trace(model, (options.batch, *options.input), loss=loss)
    except TraceError as error:
        reason = str(error.__cause__).split("\n")[0]
        if not isinstance(error.__cause__, (RuntimeError, ValueError)) or "meta" in reason:
            raise
        raise ModelError(
            f"--input {','.join(map(str, options.input))}: {options.model} does not take samples of these extents "
            f"({reason}); give those of one sample, channels first, such as 3,224,224"
        ) from error


def built(options: argparse.Namespace) -> torch.nn.Module:
    """The network itself.

    Raises
    ------
    ModelError
        If there is no such network.
    """
    channels, classes, width = options.input[0], options.classes, options.width
    return weighed(
        options.model,
        lambda: build_model(options.model, MPI.COMM_SELF, seed=0, in_channels=channels, classes=classes, width=width),
    )


def on_rank_0(comm: MPI.Intracomm, attempt: Callable[[], T]) -> T:
    """:func:`on_first_ranks` of rank 0 alone. Collective."""
    return on_first_ranks(comm, 1, attempt)


def on_first_ranks(comm: MPI.Intracomm, ranks: int, attempt: Callable[[], T]) -> T:
    """What ``attempt``, made by the first ``ranks``, returns on rank 0, on all; the others sleep meanwhile. Collective.

    Raises
    ------
    DistconvError
        On all ranks with the same text, if ``attempt`` fails.
    """

    def attempted() -> T | None:
        try:
            return attempt() if comm.rank < ranks else None
        finally:
            wait_asleep(comm)

    result: T = comm.bcast(try_on_all_ranks(comm, attempted, DistconvError))
    return result


def wait_asleep(comm: MPI.Intracomm) -> None:
    """A barrier that leaves the cores to the ranks still at work: MPI's own would spin on them."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(POLL_S)


def check_writable(option: str, path: Path) -> None:
    """Raise DataError if no file can be written at ``path``: before hours of work, not after.

    Raises
    ------
    DataError
        If none can.
    """
    if path.is_dir():
        raise DataError(f"{option} {path}: that is a folder; name a file")
    if not path.parent.is_dir():
        raise DataError(f"{option} {path}: there is no folder {path.parent}; make it first")
    # A file is written beside and renamed, which is for the folder to allow; a device or a pipe is written to.
    if not os.access(path if path.exists() and not path.is_file() else path.parent, os.W_OK):
        raise DataError(f"{option} {path}: no permission to write there")
