"""Plans: which layer of a model runs on which process grid.

    {"format": "distconv-plan", "version": 1, "ranks": 4,
     "layers": {"*": {"n": 1, "h": 4}, "layer4.*": {"c": 4}, "fc": {"n": 4}}}

Patterns are matched (``fnmatch``) against the full names of convolution and linear layers; a pattern may also be the
exact name of any module. If several patterns match, the last one wins. All other operators use the grid of their first
argument. If the parts of a layer multiply to fewer than the number of ranks, the remaining ranks hold replicas (axis
``r``). The optional key ``"batch_norm"`` is described in ``distconv.batch_norm_scope``. The optional key
``"shard_weights"``, such as ``{"layer4.*": true, "fc": "n"}`` or ``true``, names axes over which layers shard their
weights.

Source: Dryden et al. 2019, III-C and V-C.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from mpi4py import MPI
from torch.nn.modules.conv import _ConvNd

from distconv.arrangement import AXES
from distconv.batch_norm_scope import BATCH_NORM_SCOPES
from distconv.communication.agreement import check_same_on_all_ranks, try_for_same_result
from distconv.communication.derived import CommunicatorRegistry
from distconv.errors import PlanError, UnsupportedOperation
from distconv.grid import ProcessGrid
from distconv.parameters.sharded_axes import parse_weight_axes
from distconv.text_files import File, load
from distconv.whole_files import write_file

FORMAT = "distconv-plan"
VERSION = 1

Axes = tuple[tuple[str, int], ...]
"""Axes of a grid that have more than one part, sorted, with their numbers of parts."""

V = TypeVar("V")

_SPATIAL = {1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}


class PlanFields(File):
    """Schema of a plan without its header; the keys are the parameters of :class:`Plan`."""

    layers: dict[str, dict[str, int]]
    ranks: int | None = None
    batch_norm: str = "global"
    shard_weights: dict[str, str | bool] | str | bool = False


class _File(PlanFields, kw_only=True):
    format: Literal["distconv-plan"]
    version: Literal[1]


class Plan:
    """The process grid of each layer of a model.

    Parameters
    ----------
    layers : mapping of str to mapping of str to int
        For each layer name pattern, the number of parts along each grid axis, such as ``{"*": {"h": 4}, "fc": {"n":
        4}}``. Later patterns win.
    ranks : int, optional
        Number of ranks that the plan is made for. By default any number that the parts divide.
    batch_norm : {"global", "spatial", "local"}
        The values over which batch norm computes its statistics, as in :func:`parallelize`.
    shard_weights : mapping of str to str or bool, str or bool
        For each layer name pattern, the axes over which weights are sharded, as in :func:`parallelize`; one value
        applies to all layers of the plan. Later patterns win, and layers that no pattern names keep full weights.

    Attributes
    ----------
    layers, ranks, batch_norm
        As the parameters.
    shard_weights : dict of str to str or bool
        Axes by pattern.

    Raises
    ------
    PlanError
        If a pattern, an axis, a number of parts, ``batch_norm`` or ``shard_weights`` is invalid, or the parts of a
        pattern do not divide ``ranks``.

    Examples
    --------
    >>> Plan({"*": {"h": 4}, "fc": {"n": 4}})
    Plan('*': h=4, 'fc': n=4)
    """

    def __init__(
        self,
        layers: Mapping[str, Mapping[str, int]],
        ranks: int | None = None,
        *,
        batch_norm: str = "global",
        shard_weights: Mapping[str, str | bool] | str | bool = False,
    ) -> None:
        if not isinstance(layers, Mapping) or not layers:
            raise PlanError(f"a plan needs at least one layer name pattern, not {layers!r}")
        if ranks is not None and not _is_positive_int(ranks):
            raise PlanError(f"plan: ranks={ranks!r} must be a positive whole number")
        if batch_norm not in BATCH_NORM_SCOPES:
            raise PlanError(f"plan: batch_norm={batch_norm!r} must be one of {', '.join(BATCH_NORM_SCOPES)}")
        for pattern, parts in layers.items():
            if not isinstance(pattern, str) or not isinstance(parts, Mapping):
                raise PlanError(f"plan: {pattern!r}: {parts!r} must be a pattern with its parts, like {{'h': 4}}")
            check_parts(pattern, parts)
            if ranks is not None and ranks % math.prod(parts.values()):
                raise PlanError(
                    f"plan: {pattern!r}: {format_parts(parts)} has {math.prod(parts.values())} parts, which do not "
                    f"divide the plan's {ranks} ranks"
                )
        self.layers = {pattern: dict(parts) for pattern, parts in layers.items()}
        self.ranks = ranks
        self.batch_norm = batch_norm
        self.shard_weights = _by_pattern(shard_weights)
        self._grids: WeakKeyDictionary[CommunicatorRegistry, dict[Axes, ProcessGrid]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        # Grids belong to this process.
        return {name: value for name, value in vars(self).items() if name != "_grids"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _grids=WeakKeyDictionary())

    # -- files --------------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | os.PathLike[str], comm: MPI.Intracomm | None = None) -> Plan:
        """Read a plan from a file.

        Collective: call on every rank of ``comm``.

        Parameters
        ----------
        path : str or path-like
            A file that :meth:`save` wrote.
        comm : MPI.Intracomm, optional
            The ranks (default: ``MPI.COMM_WORLD``).

        Returns
        -------
        Plan

        Raises
        ------
        PlanError
            On every rank, if a rank cannot read the file, or the file does not contain a plan.
        MismatchError
            On every rank, if ranks read different plans.
        """
        return try_for_same_result(comm or MPI.COMM_WORLD, lambda: cls._read(Path(path)), PlanError, "plan")

    @classmethod
    def _read(cls, path: Path) -> Plan:
        file = load(path, _File, "plan", PlanError)
        try:
            return cls(file.layers, file.ranks, batch_norm=file.batch_norm, shard_weights=file.shard_weights)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file.

        Not collective: every rank that calls it writes.

        Parameters
        ----------
        path : str or path-like
            The file, which is replaced if it exists.

        Raises
        ------
        OSError
            If the file cannot be written.
        """
        write_file(path, self.to_json() + "\n")

    def to_json(self) -> str:
        """Return the content of a plan file."""
        return json.dumps({"format": FORMAT, "version": VERSION, **self.entries()}, indent=1)

    def entries(self) -> dict[str, Any]:
        """Return the fields of a plan file, without those that have their default."""
        ranks = {} if self.ranks is None else {"ranks": self.ranks}
        batch_norm = {} if self.batch_norm == "global" else {"batch_norm": self.batch_norm}
        shard_weights = {"shard_weights": self.shard_weights} if self.shard_weights else {}
        return {**ranks, **batch_norm, "layers": self.layers, **shard_weights}

    # -- application to a model ---------------------------------------------------------------------------------------

    def parts(self, model: torch.nn.Module) -> dict[str, dict[str, int]]:
        """Return the parts of every layer of a model that has a grid of its own.

        Parameters
        ----------
        model : torch.nn.Module
            Model whose layers the patterns of the plan are compared with.

        Returns
        -------
        dict of str to dict of str to int
            The number of parts along each axis by layer name, in the order of ``model.named_modules()``.

        Raises
        ------
        PlanError
            If a pattern matches no layer, or a layer is split along an axis that its input does not have.
        """
        modules = dict(model.named_modules())
        plannable = [name for name, module in modules.items() if is_plannable_layer(module)]
        by_module = match_patterns(self.layers, modules, plannable, type(model).__name__)
        for name, parts in by_module.items():
            module = modules[name]
            if isinstance(module, _ConvNd):
                check_axes(name, type(module).__name__, len(module.kernel_size), parts)
        return {name: dict(by_module[name]) for name in modules if name in by_module}

    def sharding(self, model: torch.nn.Module) -> dict[str, str | bool]:
        """Return the axes over which the layers of a model shard their weights.

        Parameters
        ----------
        model : torch.nn.Module
            Model whose layers the patterns of the plan are compared with.

        Returns
        -------
        dict of str to str or bool
            Axes as in :func:`parallelize`, by layer name; layers with full weights are left out.

        Raises
        ------
        PlanError
            If a pattern matches no layer that has a grid of its own.
        """
        names = list(self.parts(model))
        return match_patterns(self.shard_weights, names, names, type(model).__name__, "plan: shard_weights")

    def grids(self, model: torch.nn.Module, comm: MPI.Intracomm) -> dict[str, ProcessGrid]:
        """Return the process grid of every layer of a model that has a grid of its own.

        Collective: call on every rank of ``comm``. Repeated calls return the same grids.

        Parameters
        ----------
        model : torch.nn.Module
            Model whose layers the patterns of the plan are compared with.
        comm : MPI.Intracomm
            The ranks.

        Returns
        -------
        dict of str to ProcessGrid
            The grid by layer name, in the order of ``model.named_modules()``.

        Raises
        ------
        PlanError
            On every rank, if the plan does not fit the model or the number of ranks.
        MismatchError
            On every rank, if ranks have different plans.
        """
        check_same_on_all_ranks(comm, "plan", repr(self))
        if self.ranks not in (None, comm.size):
            raise PlanError(f"plan: made for {self.ranks} ranks, but there are {comm.size}; start {self.ranks} ranks")
        # Weak references: the grids are dropped with the communicator that they are derived from.
        grids_by_axes = self._grids.setdefault(CommunicatorRegistry.get(comm), {})
        grids = {}
        for name, parts in self.parts(model).items():
            check_product(name, parts, comm.size)
            product = math.prod(parts.values())
            # Ranks that remain hold replicas.
            axes = {**parts, "r": parts.get("r", 1) * (comm.size // product)}
            key = tuple(sorted((axis, number) for axis, number in axes.items() if number > 1))
            if key not in grids_by_axes or not grids_by_axes[key].world:  # the user has freed the grid
                # Collective. All ranks have the same layers in the same order.
                grids_by_axes[key] = ProcessGrid(comm, **axes)
            grids[name] = grids_by_axes[key]
        return grids

    def input_grid(self, model: torch.nn.Module, comm: MPI.Intracomm) -> ProcessGrid:
        """Return the grid to which the model's input is scattered: that of the first layer that has a grid of its own.

        Collective: call on every rank of ``comm``.

        Parameters
        ----------
        model, comm
            As in :meth:`grids`.

        Returns
        -------
        ProcessGrid
        """
        return next(iter(self.grids(model, comm).values()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        ranks = "" if self.ranks is None else f", ranks={self.ranks}"
        batch_norm = "" if self.batch_norm == "global" else f", batch_norm={self.batch_norm!r}"
        sharded = f", shard_weights={self.shard_weights}" if self.shard_weights else ""
        layers = ", ".join(f"{pattern!r}: {format_parts(parts)}" for pattern, parts in self.layers.items())
        return f"Plan({layers}{ranks}{batch_norm}{sharded})"


def _by_pattern(shard_weights: Mapping[str, str | bool] | str | bool) -> dict[str, str | bool]:
    """Return the axes of sharded weights by pattern, checked."""
    patterns = shard_weights if isinstance(shard_weights, Mapping) else {"*": shard_weights} if shard_weights else {}
    for pattern, axes in patterns.items():
        try:
            parse_weight_axes(axes, f"plan: shard_weights: {pattern!r}")
        except UnsupportedOperation as error:
            raise PlanError(str(error)) from None
    return dict(patterns)


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def format_parts(parts: Mapping[str, int]) -> str:
    """Return ``parts`` as a string, such as ``h=2,w=2``, or ``n=1`` if nothing is split.

    Parameters
    ----------
    parts : mapping of str to int
        Number of parts by letter of the axis.

    Returns
    -------
    str
    """
    return ",".join(f"{axis}={number}" for axis, number in parts.items()) or "n=1"


def is_plannable_layer(module: torch.nn.Module) -> bool:
    """Return True for a convolution or linear layer: patterns with wildcards match these layers only (V-C).

    Parameters
    ----------
    module : Module
        Module of a model.

    Returns
    -------
    bool
    """
    return isinstance(module, (_ConvNd, torch.nn.Linear))


def match_patterns(
    values: Mapping[str, V], names: Collection[str], plannable: Sequence[str], model: str, what: str = "plan"
) -> dict[str, V]:
    """Return the value of every layer that a pattern matches; later patterns win.

    Parameters
    ----------
    values : mapping of str to object
        Values by pattern, such as the parts along each axis.
    names : collection of str
        Names of all modules, each of which a pattern may name exactly.
    plannable : sequence of str
        Names of the layers that patterns are matched against.
    model : str
        The name of the model in errors.
    what : str
        Source of the patterns, with which the error begins.

    Returns
    -------
    dict of str to object
        Values by layer name.

    Raises
    ------
    PlanError
        If a pattern matches nothing.
    """
    matched: dict[str, V] = {}
    for pattern, value in values.items():
        # An exact name may be that of any module. Wildcards match layers that can be planned only.
        matching = [pattern] if pattern in names else [name for name in plannable if fnmatchcase(name, pattern)]
        if not matching:
            raise PlanError(
                f"{what}: {pattern!r} matches no layer of {model}; its {len(plannable)} convolution and linear layers "
                f"are {', '.join(plannable[:8])}{', ...' if len(plannable) > 8 else ''}"
            )
        matched.update((name, value) for name in matching)
    return matched


def check_parts(name: str, parts: Mapping[str, int]) -> None:
    """Check that the parts of a layer are positive integers along known axes.

    Parameters
    ----------
    name : str
        Name of the layer or pattern, for messages.
    parts : mapping of str to int
        Number of parts by letter of the axis.

    Raises
    ------
    PlanError
        If an axis is unknown or a number is invalid; the error contains ``name``.
    """
    for axis, number in parts.items():
        if axis not in AXES:
            raise PlanError(f"plan: {name!r}: unknown axis {axis!r}; the axes are {', '.join(AXES)}")
        if not _is_positive_int(number):
            raise PlanError(f"plan: {name!r}: {axis}={number!r} must be a positive whole number of parts")


def check_product(name: str, parts: Mapping[str, int], ranks: int) -> None:
    """Check that the product of a layer's parts divides the number of ranks.

    Parameters
    ----------
    name : str
        Name of the layer or pattern, for messages.
    parts : mapping of str to int
        Number of parts by letter of the axis.
    ranks : int
        Number of ranks of the grid.

    Raises
    ------
    PlanError
        If it does not; the error contains ``name``.
    """
    product = math.prod(parts.values())
    if ranks % product:
        raise PlanError(
            f"plan: {name!r}: {format_parts(parts)} has {product} parts, which do not divide the {ranks} ranks"
        )


def check_axes(name: str, kind: str, dimensions: int, parts: Mapping[str, int]) -> None:
    """Check that a convolution is not split along a spatial axis that its input does not have.

    Linear layers are not checked: along an axis that the input of a linear layer does not have, ranks compute the same.
    A plan that splits all layers by ``h`` depends on this if the mini-batch has one sample.

    Parameters
    ----------
    name, kind : str
        The layer's name and class for the error.
    dimensions : int
        Number of spatial dimensions.
    parts : mapping of str to int
        Number of parts along each axis.

    Raises
    ------
    PlanError
        If the layer is split along such an axis.
    """
    axes = ("n", "c", *_SPATIAL[dimensions], "r")
    wrong = [axis for axis, number in parts.items() if number > 1 and axis not in axes]
    if wrong:
        raise PlanError(
            f"plan: {name!r} ({kind}) is split along {', '.join(wrong)}, but its input has only "
            f"{', '.join(axes[:-1])}; use those, or r to let ranks compute the same"
        )
