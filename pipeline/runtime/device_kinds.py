"""Kinds of devices in one job, and the ranks in the order that a plan requires.

The option ``--devices`` accepts::

    titanxp:2,v100:2   ranks 0 and 1 have a titanxp, 2 and 3 a v100
    gpu                a rank's kind is the name of its GPU, such as tesla-v100-sxm2-16gb
    host               a rank's kind is the name of its host

Source: Zhai et al. 2020 (SparsePipe), III-C.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from mpi4py import MPI

from distconv.communication.agreement import try_on_all_ranks
from distconv.errors import PlanError

GPU, HOST = "gpu", "host"

Kinds = Mapping[str, int] | str
"""Number of ranks of each kind, in the order of the ranks; or the source of the names, ``gpu`` or ``host``."""


def parse_kinds(text: str) -> Kinds:
    """Return the kinds of a ``--devices`` option.

    Parameters
    ----------
    text : str

    Returns
    -------
    dict or str

    Raises
    ------
    PlanError
        If the option is invalid.

    Examples
    --------
    >>> parse_kinds("titanxp:2,v100:1"), parse_kinds("gpu")
    ({'titanxp': 2, 'v100': 1}, 'gpu')
    """
    if text in (GPU, HOST):
        return text
    numbers: dict[str, int] = {}
    for word in text.split(","):
        match = re.fullmatch(r"([a-z0-9][a-z0-9._-]*):([1-9]\d{0,5})", word)
        if match is None or match[1] in numbers:
            twice = "occurs twice" if match else "is not a kind of device with a count"
            raise PlanError(
                f"devices {text!r}: {word!r} {twice}; write each kind once, in small letters, such as old:2,new:2, or "
                f"{GPU} or {HOST}"
            )
        numbers[match[1]] = int(match[2])
    return numbers


def kind_of_rank(kinds: Kinds, comm: MPI.Intracomm, device: torch.device) -> str:
    """Return the kind of this rank's device. Collective: call on every rank.

    Parameters
    ----------
    kinds : dict or str
        As :func:`parse_kinds` returns.
    comm : MPI.Intracomm
    device : device
        Device of this rank.

    Returns
    -------
    str

    Raises
    ------
    PlanError
        On all ranks, if the counts do not add up to the number of ranks, or a GPU's name is required of another device.
    """
    return try_on_all_ranks(comm, lambda: _find_kind(kinds, comm, device), PlanError)


def _find_kind(kinds: Kinds, comm: MPI.Intracomm, device: torch.device) -> str:
    if isinstance(kinds, str):
        if kinds == GPU and device.type != "cuda":
            raise PlanError(
                f"devices {GPU}: {device.type} has no such name; count the kinds instead, such as old:2,new:2"
            )
        return as_name(torch.cuda.get_device_name(device) if kinds == GPU else MPI.Get_processor_name())
    order = [kind for kind, count in kinds.items() for _ in range(count)]
    if len(order) != comm.size:
        raise PlanError(f"devices {format_kinds(kinds)}: {len(order)} ranks are counted, but there are {comm.size}")
    return order[comm.rank]


def as_name(text: str) -> str:
    """Return a name in the form of a kind: small letters, digits, ``.``, ``_`` and ``-``.

    Examples
    --------
    >>> as_name("NVIDIA H100 80GB HBM3")
    'nvidia-h100-80gb-hbm3'
    """
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-")


def format_kinds(kinds: Mapping[str, int]) -> str:
    """Return kinds in the form of the ``--devices`` option."""
    return ",".join(f"{kind}:{count}" for kind, count in kinds.items())


@contextmanager
def reorder_ranks(comm: MPI.Intracomm, kind: str | None, wanted: Sequence[str]) -> Iterator[MPI.Intracomm]:
    """Reorder ranks so that each has the kind of device that a plan requires. Collective: enter on every rank.

    Parameters
    ----------
    comm : MPI.Intracomm
    kind : str or None
        Kind of this rank's device.
    wanted : sequence of str
        Kind of each rank in the plan. If it is empty, the order does not change.

    Yields
    ------
    MPI.Intracomm
        Ranks of one kind keep their order.

    Raises
    ------
    PlanError
        On all ranks, if there are other devices than the plan requires.
    """
    if not wanted:
        yield comm
        return
    ordered = MPI.Intracomm(comm.Split(0, _rank_order(comm, kind, wanted)))
    yield ordered
    ordered.Free()  # not after an error on this rank alone: Free would wait for the others


def _rank_order(comm: MPI.Intracomm, kind: str | None, wanted: Sequence[str]) -> int:
    """Return the position of this rank in the order of ``wanted``. Collective."""
    # Every rank checks the kinds of all ranks, so all raise the same error or none does.
    kinds_of_ranks: list[str | None] = comm.allgather(kind)
    if None in kinds_of_ranks:
        raise PlanError(
            f"pipeline plan: made for {format_kinds(Counter(wanted))}; specify the kind of device of each rank "
            "(--devices)"
        )
    counted = Counter(map(str, kinds_of_ranks))
    if counted != Counter(wanted):
        raise PlanError(
            f"pipeline plan: made for {format_kinds(Counter(wanted))}, found {format_kinds(counted)}; start ranks "
            "on such devices, or make another plan with distconv explore --devices"
        )
    # The n-th rank with a kind takes the n-th position of this kind.
    positions = {each: iter([position for position, name in enumerate(wanted) if name == each]) for each in counted}
    return [next(positions[str(each)]) for each in kinds_of_ranks][comm.rank]
