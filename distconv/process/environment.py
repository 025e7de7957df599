"""The environment variables that distconv reads: all of them are here. Set them before it is imported.

Those of the shell scripts (``DISTCONV_VENV``, ...) are in ``jobs/environment.sh``. An empty variable counts as not set.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from distconv.errors import EnvironmentVariableError
from distconv.process.memory import caching_allocators

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """An environment variable: its values as a user writes them, and its default."""

    name: str
    values: str
    """Description of the valid values: ``off, plan or all``."""
    meaning: str
    """Effect of the variable."""
    default: str
    """Description of the default."""
    unset: T
    """The default value."""
    read: Callable[[str], T]
    """Parses the string; raises ValueError or KeyError if it is invalid."""

    def value(self, environment: Mapping[str, str] = os.environ) -> T:
        """Return the value in force.

        Raises
        ------
        EnvironmentVariableError
            If the string is invalid. On this rank alone, unless :func:`check` has raised it on all ranks before.
        """
        text = environment.get(self.name)
        if not text:
            return self.unset
        try:
            return self.read(text)
        except (KeyError, ValueError):
            raise EnvironmentVariableError(
                f"{self.name}={text!r} must be {self.values}; default: {self.default}"
            ) from None

    def value_or_default(self, environment: Mapping[str, str] = os.environ) -> T:
        """Return the value in force, or the default if the string is invalid.

        For modules that read a variable when they are imported. :func:`check` later raises on all ranks, before any of
        them communicates; an error during the import would be raised on the ranks with the invalid string alone.
        """
        try:
            return self.value(environment)
        except EnvironmentVariableError:
            return self.unset


def _at_least_0(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError
    return value


CHECK = Variable(
    "DISTCONV_CHECK",
    "off, plan or all",
    "compare a digest of shapes, dtypes, grids, scattered values, weights and called layers over the ranks: never, "
    "when a plan is built, a tensor scattered, a model parallelized or called, a gradient summed and in the first 200 "
    "exchanges, or at every operator as well",
    "plan",
    "plan",
    {level: level for level in ("off", "plan", "all")}.__getitem__,
)
TIMEOUT_S = Variable(
    "DISTCONV_TIMEOUT_S",
    "seconds from 0 on",
    "end the job, with all stacks and exit code 75, when a rank has waited this long (0: never); report where all "
    "ranks are after 30 s, or half of this time",
    "600",
    600.0,
    _at_least_0,
)
MALLOC = Variable[str | None](
    "DISTCONV_MALLOC",
    f"0, 1, {', '.join(caching_allocators.FILES)}",
    "leave the allocator unchanged (0), or keep freed memory: by the best allocator here (1), or by the named one",
    "1 for commands and with several ranks, else 0",
    None,
    {name: name for name in ("0", "1", *caching_allocators.FILES)}.__getitem__,
)
TRANSPORT = Variable[str | None](
    "DISTCONV_TRANSPORT",
    "host, cuda-aware, nccl or torch",
    "how CUDA tensors cross ranks: through MPI by way of pinned host memory or as device buffers, or through NCCL; "
    "torch: those of the CPU, too, through torch's process groups, CUDA tensors by NCCL and others by gloo",
    "NCCL between the ranks of a grid, if torch has it, each rank has its own GPU and messages are faster than by "
    "MPI; with MPI device buffers if it reports support and messages between the ranks confirm that; else host",
    None,
    {name: name for name in ("host", "cuda-aware", "nccl", "torch")}.__getitem__,
)
FALLBACK = Variable(
    "DISTCONV_FALLBACK",
    "warn or error",
    "where a call has no distributed rule: gather its tensors and compute the full result on every rank, with a "
    "warning for each call site, or raise UnsupportedOperation",
    "warn",
    "warn",
    {level: level for level in ("warn", "error")}.__getitem__,
)
FALLBACK_LIMIT = Variable(
    "DISTCONV_FALLBACK_LIMIT",
    "bytes from 0 on",
    "raise UnsupportedOperation where such a call would gather more than this",
    "1e9",
    1e9,
    _at_least_0,
)
TRACEBACK = Variable(
    "DISTCONV_TRACEBACK",
    "short or full",
    "print the traceback of an error of distconv's that ends the job without distconv's own lines, or with them",
    "short",
    "short",
    {length: length for length in ("short", "full")}.__getitem__,
)
LAUNCH = Variable(
    "DISTCONV_LAUNCH",
    "check or trust",
    "end the job when the launcher started several processes and MPI has one rank in each, or let each continue alone",
    "check",
    "check",
    {choice: choice for choice in ("check", "trust")}.__getitem__,
)

VARIABLES: tuple[Variable[Any], ...] = (
    CHECK,
    TIMEOUT_S,
    MALLOC,
    TRANSPORT,
    FALLBACK,
    FALLBACK_LIMIT,
    TRACEBACK,
    LAUNCH,
)


def check(comm: MPI.Intracomm, environment: Mapping[str, str] = os.environ) -> None:
    """Check on all ranks of ``comm`` that the variables are valid and the same.

    Collective: call on every rank of ``comm``.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks.
    environment : mapping of str to str
        This rank's environment.

    Raises
    ------
    EnvironmentVariableError
        On all ranks, with the message of the lowest rank with an invalid value, or with two different values of the
        first variable that differs.
    """
    # Not set and empty are the same.
    mine = _wrong(environment), {variable.name: environment.get(variable.name) or "" for variable in VARIABLES}
    # Before any error is raised, so that no rank waits for one that has raised.
    everyone: Sequence[tuple[str, dict[str, str]]] = comm.allgather(mine)
    reasons = [reason for reason, _ in everyone]
    for rank, text in enumerate(reasons):
        if text:
            raise EnvironmentVariableError(text if all(reasons) else f"{text} (on rank {rank})")
    for variable in VARIABLES:
        values = [set_to[variable.name] for _, set_to in everyone]
        if len(set(values)) > 1:
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            raise EnvironmentVariableError(
                f"{variable.name} differs between ranks: {values[0] or 'not set'} on rank 0, "
                f"{values[other] or 'not set'} on rank {other}. Export the same value to all ranks."
            )


def _wrong(environment: Mapping[str, str]) -> str:
    try:
        for variable in VARIABLES:
            variable.value(environment)
    except EnvironmentVariableError as error:
        return str(error)
    return ""
