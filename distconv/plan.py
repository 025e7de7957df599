"""Plans: which layer of a model runs on which process grid.

    {"format": "distconv-plan", "version": 1, "ranks": 4,
     "layers": {"*": {"n": 1, "h": 4}, "layer4.*": {"c": 4}, "fc": {"n": 4}}}

A pattern is matched (``fnmatch``) against the full names of the layers; later patterns win. Convolution and linear
layers decide their distribution, and so does any module that a pattern names exactly; all other operators stay on the
grid of their first argument. Parts whose product is smaller than the number of ranks leave replicas (axis ``r``).
``"batch_norm": "local"`` or ``"spatial"`` beside the layers lets batch norm take its statistics over less than the
mini-batch (distconv.batch_norm_scope).

Source: Dryden et al. 2019, III-C and V-C.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from mpi4py import MPI
from torch.nn.modules.conv import _ConvNd

from distconv.arrangement import AXES
from distconv.batch_norm_scope import BATCH_NORM
from distconv.communication.agreement import check_same_on_all_ranks, try_for_same_result
from distconv.communication.derived import CommunicatorRegistry
from distconv.errors import PlanError
from distconv.grid import ProcessGrid
from distconv.text_files import File, load
from distconv.whole_files import write_file

FORMAT = "distconv-plan"
VERSION = 1

Axes = tuple[tuple[str, int], ...]
"""A grid's axes of more than one part, sorted, with their parts."""

_SPATIAL = {1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}


class Entries(File):
    """Schema of a plan file; the keys are the fields of :class:`Plan`."""

    layers: dict[str, dict[str, int]]
    ranks: int | None = None
    batch_norm: str = "global"


class _File(Entries, kw_only=True):
    format: Literal["distconv-plan"]
    version: Literal[1]


class Plan:
    """For layer name patterns the parts along each grid axis: ``Plan({"*": {"h": 4}, "fc": {"n": 4}})``.

    ``ranks`` is the number of ranks that it was made for; without it any number will do that the parts divide.
    ``batch_norm`` is what the model's batch norms take their statistics over (distconv.batch_norm_scope).

    Raises
    ------
    PlanError
        If a pattern, an axis, a number of parts or the statistics are none.
    """

    def __init__(
        self, layers: Mapping[str, Mapping[str, int]], ranks: int | None = None, *, batch_norm: str = "global"
    ) -> None:
        if not isinstance(layers, Mapping) or not layers:
            raise PlanError(f"a plan needs at least one layer name pattern, not {layers!r}")
        if ranks is not None and not _positive(ranks):
            raise PlanError(f"plan: ranks={ranks!r} must be a positive whole number")
        if batch_norm not in BATCH_NORM:
            raise PlanError(f"plan: batch_norm={batch_norm!r}: it is one of {', '.join(BATCH_NORM)}")
        for pattern, parts in layers.items():
            if not isinstance(pattern, str) or not isinstance(parts, Mapping):
                raise PlanError(f"plan: {pattern!r}: {parts!r} must be a pattern with its parts, like {{'h': 4}}")
            check_parts(pattern, parts)
            if ranks is not None and ranks % math.prod(parts.values()):
                raise PlanError(
                    f"plan: {pattern!r}: {written(parts)} has {math.prod(parts.values())} parts, which do not divide "
                    f"the plan's {ranks} ranks"
                )
        self.layers = {pattern: dict(parts) for pattern, parts in layers.items()}
        self.ranks = ranks
        self.batch_norm = batch_norm
        self._grids: WeakKeyDictionary[CommunicatorRegistry, dict[Axes, ProcessGrid]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_grids"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _grids=WeakKeyDictionary())

    # -- files --------------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | os.PathLike[str], comm: MPI.Intracomm | None = None) -> Plan:
        """The plan in a file of :meth:`save`. Collective over ``comm`` (default: all ranks).

        Raises
        ------
        PlanError
            On all ranks, if any of them cannot read it or finds something else in it.
        MismatchError
            If the ranks find different plans.
        """
        return try_for_same_result(comm or MPI.COMM_WORLD, lambda: cls._read(Path(path)), PlanError, "plan")

    @classmethod
    def _read(cls, path: Path) -> Plan:
        file = load(path, _File, "plan", PlanError)
        try:
            return cls(file.layers, file.ranks, batch_norm=file.batch_norm)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. Every rank that calls it writes."""
        write_file(path, self.to_json() + "\n")

    def to_json(self) -> str:
        """The content of a plan file."""
        return json.dumps({"format": FORMAT, "version": VERSION, **self.entries()}, indent=1)

    def entries(self) -> dict[str, Any]:
        """What a file says of it; what is as it is by default is left out."""
        ranks = {} if self.ranks is None else {"ranks": self.ranks}
        batch_norm = {} if self.batch_norm == "global" else {"batch_norm": self.batch_norm}
        return {**ranks, **batch_norm, "layers": self.layers}

    # -- what it says of a model --------------------------------------------------------------------------------------

    def parts(self, model: torch.nn.Module) -> dict[str, dict[str, int]]:
        """Parts along each axis of every layer of ``model`` that the plan decides, by its name.

        Raises
        ------
        PlanError
            If a pattern matches no layer, or gives a layer an axis that its input has not got.
        """
        modules = dict(model.named_modules())
        deciding = [name for name, module in modules.items() if decides(module)]
        by_module = matched(self.layers, modules, deciding, type(model).__name__)
        for name, parts in by_module.items():
            module = modules[name]
            if isinstance(module, _ConvNd):
                check_axes(name, type(module).__name__, len(module.kernel_size), parts)
        return {name: by_module[name] for name in modules if name in by_module}

    def grids(self, model: torch.nn.Module, comm: MPI.Intracomm) -> dict[str, ProcessGrid]:
        """The process grid of every layer that the plan decides; the same grids at each call. Collective.

        Raises
        ------
        PlanError
            On all ranks, if the plan does not fit the model or the ranks of ``comm``.
        """
        check_same_on_all_ranks(comm, "plan", repr(self))
        if self.ranks not in (None, comm.size):
            raise PlanError(f"plan: made for {self.ranks} ranks, but there are {comm.size}; start {self.ranks} ranks")
        of_parts = self._grids.setdefault(CommunicatorRegistry.get(comm), {})
        grids = {}
        for name, parts in self.parts(model).items():
            check_product(name, parts, comm.size)
            product = math.prod(parts.values())
            axes = {**parts, "r": parts.get("r", 1) * (comm.size // product)}
            key = tuple(sorted((axis, number) for axis, number in axes.items() if number > 1))
            if key not in of_parts or not of_parts[key].world:  # it has been freed
                of_parts[key] = ProcessGrid(comm, **axes)
            grids[name] = of_parts[key]
        return grids

    def input_grid(self, model: torch.nn.Module, comm: MPI.Intracomm) -> ProcessGrid:
        """The grid of the model's first layer (in the order of its modules) that the plan decides: where data go."""
        return next(iter(self.grids(model, comm).values()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        ranks = "" if self.ranks is None else f", ranks={self.ranks}"
        batch_norm = "" if self.batch_norm == "global" else f", batch_norm={self.batch_norm!r}"
        return f"Plan({', '.join(f'{p!r}: {written(parts)}' for p, parts in self.layers.items())}{ranks}{batch_norm})"


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def written(parts: Mapping[str, int]) -> str:
    """``parts`` as text: ``h=2,w=2``, or ``n=1`` where nothing is split."""
    return ",".join(f"{axis}={number}" for axis, number in parts.items()) or "n=1"


def decides(module: torch.nn.Module) -> bool:
    """Whether ``module`` is a convolution or linear layer: those decide their distribution (V-C)."""
    return isinstance(module, (_ConvNd, torch.nn.Linear))


def matched(
    layers: Mapping[str, Mapping[str, int]], names: Collection[str], deciding: Sequence[str], model: str
) -> dict[str, dict[str, int]]:
    """Parts of every layer that a pattern matches, later patterns winning.

    A pattern is one of ``names``, or matches some of the layers ``deciding``.

    Raises
    ------
    PlanError
        If it is and does neither; the text names ``model``.
    """
    parts_of: dict[str, dict[str, int]] = {}
    for pattern, parts in layers.items():
        matching = [pattern] if pattern in names else [name for name in deciding if fnmatchcase(name, pattern)]
        if not matching:
            raise PlanError(
                f"plan: {pattern!r} matches no layer of {model}; its {len(deciding)} convolution and linear layers are "
                f"{', '.join(deciding[:8])}{', ...' if len(deciding) > 8 else ''}"
            )
        parts_of.update((name, dict(parts)) for name in matching)
    return parts_of


def check_parts(name: str, parts: Mapping[str, int]) -> None:
    """Refuse parts of a layer that are no positive whole numbers, or lie along what is no axis.

    Raises
    ------
    PlanError
        If there are any.
    """
    for axis, number in parts.items():
        if axis not in AXES:
            raise PlanError(f"plan: {name!r}: unknown axis {axis!r}; the axes are {', '.join(AXES)}")
        if not _positive(number):
            raise PlanError(f"plan: {name!r}: {axis}={number!r} must be a positive whole number of parts")


def check_product(name: str, parts: Mapping[str, int], ranks: int) -> None:
    """Refuse parts of a layer that do not divide ``ranks``.

    Raises
    ------
    PlanError
        If they do not.
    """
    product = math.prod(parts.values())
    if ranks % product:
        raise PlanError(f"plan: {name!r}: {written(parts)} has {product} parts, which do not divide the {ranks} ranks")


def check_axes(name: str, kind: str, dimensions: int, parts: Mapping[str, int]) -> None:
    """Refuse ``parts`` that split a dimension that a convolution's input has not got.

    Of a linear layer they may: it computes redundantly there, as it must at N = 1.

    Raises
    ------
    PlanError
        If they do.
    """
    axes = ("n", "c", *_SPATIAL[dimensions], "r")
    wrong = [axis for axis, number in parts.items() if number > 1 and axis not in axes]
    if wrong:
        raise PlanError(
            f"plan: {name!r} ({kind}) is split along {', '.join(wrong)}, but its input has only "
            f"{', '.join(axes[:-1])}; use those, or r to let ranks compute the same"
        )
