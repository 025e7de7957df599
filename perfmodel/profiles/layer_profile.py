"""Layer profile: times and sizes of each layer, and which layer reads which.

Measurements and predictions make profiles; :mod:`distconv.perfmodel.stages` and :func:`.explore` read them. Two file
formats exist. The format of distconv is JSON::

    {"layers": [{"name": "conv1", "forward_s": 0.0123, "backward_s": 0.0246,
                 "activation_bytes": 822083584, "parameter_bytes": 7168}],
     "edges": [["conv1", "relu1"]]}

PipeDream's format is plain text, with times in milliseconds and edges after a tab::

    node2 -- Linear -- forward_compute_time=2.3, backward_compute_time=4.6, activation_size=8192.0, parameter_size=512.0
    <tab>node2 -- node3

Source: Narayanan et al. 2019 (PipeDream), 3.1; Zhai et al. 2020 (SparsePipe), III-C (SmartProfile).
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from graphlib import CycleError, TopologicalSorter
from numbers import Integral
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from distconv.errors import DistconvError
from distconv.perfmodel.machine.units import number
from distconv.text_files import File, decode, parse_json, read_text, shorten
from distconv.whole_files import write_file

_FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NODE = re.compile(
    r"(\S+) -- (.*?) -- " + ", ".join(rf"{name}=([^,]+?)" for name in _FIGURES) + r"(?: -- stage_id=\d+)?"
)
_NODE_SHAPE = f"'NAME -- LAYER -- {', '.join(f'{name}=NUMBER' for name in _FIGURES)}'"
_EDGE = re.compile(r"(\S+) -- (\S+)")


class ProfileError(DistconvError, ValueError):
    """A profile cannot be read or is invalid: malformed file, invalid number, unknown layer, or cycle."""


@dataclass(frozen=True)
class Layer:
    """One layer of a profile, for one mini-batch.

    Attributes
    ----------
    name : str
    forward_s, backward_s : float
        Seconds of the forward and the backward pass.
    activation_bytes : float
        Bytes of the output.
    parameter_bytes : float
        Bytes of the parameters.

    Raises
    ------
    ProfileError
        If the name is empty or not a string, or a value is not a finite number >= 0.
    """

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ProfileError(
                f"profile: found {shorten(repr(self.name))} as the name of a layer, expected a string that is not empty"
            )
        for key in _KEYS[1:]:
            value = getattr(self, key)
            if (amount := number(value)) is None:
                raise ProfileError(
                    f"profile: layer {shorten(repr(self.name))}: {key}: found {shorten(repr(value))}, expected a "
                    "finite number >= 0"
                )
            # JSON encodes Python's own numbers only.
            object.__setattr__(self, key, int(value) if isinstance(value, Integral) else amount)

    @property
    def time_s(self) -> float:
        """Seconds of the forward and the backward pass."""
        return self.forward_s + self.backward_s


_KEYS = tuple(field.name for field in fields(Layer))


@dataclass(frozen=True)
class Profile:
    """Layers of a network in a linear order, and the edges between them.

    The order is the given one, except that a layer follows everything that it reads. Every split of this order is a
    split of the graph: the layers before it do not read the layers after it. If branches run in parallel, the graph has
    further splits that no single order contains.

    Source: Narayanan et al. 2019 (PipeDream), 3.1; Zhai et al. 2020 (SparsePipe), III-C (SmartProfile).

    Attributes
    ----------
    layers : sequence of Layer
        At least one. Stored as a tuple in the linear order.
    edges : sequence of (str, str), optional
        Producer and consumer. Default: each layer reads the one before.

    Raises
    ------
    ProfileError
        If there is no layer, a layer or edge occurs twice, a sum over the layers is not finite, an edge names an
        unknown layer, or the edges form a cycle.

    Examples
    --------
    >>> Profile([Layer("a", 1.0, 2.0, 8, 0), Layer("b", 1.0, 2.0, 8, 4)]).edges
    (('a', 'b'),)
    """

    layers: Sequence[Layer]
    edges: Sequence[tuple[str, str]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Sequence) or not all(isinstance(layer, Layer) for layer in self.layers):
            raise ProfileError(f"profile: found {shorten(repr(self.layers))} as the layers, expected a list of Layer")
        names = [layer.name for layer in self.layers]
        if not names:
            raise ProfileError("profile: found no layer, expected at least one")
        edges = list(itertools.pairwise(names)) if self.edges is None else [(a, b) for a, b in self.edges]
        _check_once(names, "layer")
        # Finite numbers may have an infinite sum, which would make all partitions equal.
        for key in ("time_s", *_KEYS[3:]):
            if not math.isfinite(sum(getattr(layer, key) for layer in self.layers)):
                raise ProfileError(f"profile: {key}: the sum over {len(names)} layers is too large for a number")
        _check_once(edges, "edge")
        position = {name: index for index, name in enumerate(names)}
        for edge in edges:
            for name in edge:
                if name not in position:
                    raise ProfileError(f"profile: edge {shorten(repr(edge))}: there is no layer {shorten(repr(name))}")
        object.__setattr__(self, "layers", tuple(self.layers[index] for index in _order(position, edges)))
        object.__setattr__(self, "edges", tuple(edges))

    @property
    def crossing_bytes(self) -> tuple[float, ...]:
        """Bytes that cross a split before each layer; the last entry is 0, for the position after all layers.

        These bytes are the output of each layer before the split that a layer after it reads, counted once. Outputs
        that no layer reads also cross: the network returns them, and the loss is computed with the last layer.
        """
        position = {layer.name: index for index, layer in enumerate(self.layers)}
        # 1. The last reader of each layer; the loss for those that no layer reads. 2. From the split after a layer to
        # that before its last reader its output crosses: add at the first, subtract after the last, and sum up.
        last = dict.fromkeys(position, len(self.layers) - 1)
        for name in {producer for producer, _ in self.edges or ()}:
            last[name] = 0
        for producer, consumer in self.edges or ():
            last[producer] = max(last[producer], position[consumer])
        change = [0.0] * (len(self.layers) + 2)
        for index, layer in enumerate(self.layers):
            change[index + 1] += layer.activation_bytes
            change[max(index, last[layer.name]) + 1] -= layer.activation_bytes
        return (*itertools.accumulate(change[: len(self.layers)]), 0.0)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Return the profile in a JSON file, or in a file of PipeDream's format without its ``Input`` nodes.

        Parameters
        ----------
        path : str or Path
            File to read.

        Returns
        -------
        Profile

        Raises
        ------
        ProfileError
            If the file cannot be read or is malformed. The message names the file, the line or key, and the problem.
        """
        text = read_text(path, "profile", ProfileError)
        try:
            return _from_json(text) if text.lstrip().startswith(("{", "[")) else _from_pipedream(text)
        except ProfileError as error:
            raise ProfileError(f"profile {path}{str(error).removeprefix('profile')}") from error

    def save(self, path: str | Path) -> None:
        """Write a JSON file that :meth:`load` reads as an equal profile.

        Parameters
        ----------
        path : str or Path
            File to write.

        Raises
        ------
        ProfileError
            If the file cannot be written.
        """
        rows = ",\n  ".join(json.dumps(asdict(layer)) for layer in self.layers)
        edges = ",\n  ".join(json.dumps(edge) for edge in self.edges or ())
        try:
            write_file(path, f'{{"layers": [\n  {rows}\n ],\n "edges": [\n  {edges}\n ]}}\n')
        except OSError as error:
            raise ProfileError(f"profile {path} cannot be written: {error.strerror or error}") from error


def _order(position: Mapping[str, int], edges: Sequence[tuple[str, str]]) -> list[int]:
    """Return the indices of the layers in the first order in which each layer follows those that it reads."""
    graph = TopologicalSorter(dict.fromkeys(position.values(), ()))
    for producer, consumer in edges:
        graph.add(position[consumer], position[producer])
    try:
        graph.prepare()
    except CycleError as error:
        names = list(position)
        loop = " -> ".join(repr(names[index]) for index in error.args[1][:-1][:8])
        raise ProfileError(f"profile: the edges form a cycle: {loop} -> ...; no layer can read itself") from error
    # A heap of the layers whose inputs are placed: the one that comes first in the given order is next.
    ready: list[int] = []
    order: list[int] = []
    while graph.is_active():
        for index in graph.get_ready():
            heapq.heappush(ready, index)
        order.append(heapq.heappop(ready))
        graph.done(order[-1])
    return order


# -- distconv's format ------------------------------------------------------------------------------------------------


_Number = Annotated[int | float, msgspec.Meta(description="a number")]


class _LayerEntry(File):
    name: str
    forward_s: _Number
    backward_s: _Number
    activation_bytes: _Number
    parameter_bytes: _Number


class _ProfileFile(File):
    layers: list[_LayerEntry]
    edges: list[Annotated[tuple[str, str], msgspec.Meta(description="the names of two layers")]]


def _from_json(text: str) -> Profile:
    file = decode(parse_json(text, "profile", ProfileError), _ProfileFile, "profile", ProfileError)
    return Profile([Layer(*msgspec.structs.astuple(layer)) for layer in file.layers], file.edges)


def mean_profile(profiles: Sequence[Profile]) -> Profile:
    """Return the profile with the mean times of several profiles of the same layers.

    Parameters
    ----------
    profiles : sequence of Profile
        At least one. Sizes and edges are those of the first.

    Returns
    -------
    Profile

    Raises
    ------
    ProfileError
        If the layers differ.
    """
    names = [[layer.name for layer in profile.layers] for profile in profiles]
    if any(each != names[0] for each in names):
        raise ProfileError(f"profile: the {len(profiles)} profiles to average have different layers")
    layers = [
        replace(
            same_layer[0],
            forward_s=math.fsum(layer.forward_s for layer in same_layer) / len(same_layer),
            backward_s=math.fsum(layer.backward_s for layer in same_layer) / len(same_layer),
        )
        for same_layer in zip(*(profile.layers for profile in profiles), strict=True)
    ]
    return Profile(layers, profiles[0].edges)


# -- PipeDream's format -----------------------------------------------------------------------------------------------


def _from_pipedream(text: str) -> Profile:
    layers: list[Layer] = []
    inputs: set[str] = set()
    edges: list[tuple[str, str]] = []
    for line_number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            if line.startswith("\t"):
                edge = _match(_EDGE, line, "'NAME -- NAME' after the tab")
                edges.append((edge[1], edge[2]))
            elif (match := _match(_NODE, line, _NODE_SHAPE))[2].startswith("Input"):
                inputs.add(match[1])
            else:
                forward_ms, backward_ms, activation, parameters = (_number(match[i]) for i in range(3, 7))
                layers.append(Layer(match[1], forward_ms / 1e3, backward_ms / 1e3, activation, parameters))
        except ProfileError as error:
            raise ProfileError(f"profile, line {line_number}{str(error).removeprefix('profile')}") from error
    _check_one_part([*inputs, *(layer.name for layer in layers)], edges)
    # PipeDream writes nodes in the order of a hash table; their numbers are the order in which they ran.
    layers.sort(key=lambda layer: _trailing_number(layer.name))
    return Profile(layers, [edge for edge in edges if edge[0] not in inputs])


def _check_one_part(names: Sequence[str], edges: Sequence[tuple[str, str]]) -> None:
    """Raise ProfileError if nodes are unconnected: edges come last, so a truncated file lacks some of them."""
    nodes = list(dict.fromkeys([*names, *itertools.chain.from_iterable(edges)]))
    position = {name: index for index, name in enumerate(nodes)}
    ends = np.array([(position[a], position[b]) for a, b in edges], dtype=int).reshape(-1, 2).T
    count, parts = connected_components(coo_matrix((np.ones(len(edges)), ends), shape=(len(nodes), len(nodes))))
    if count > 1:
        raise ProfileError(
            f"profile: the edges leave {len(nodes)} nodes in {count} unconnected parts, one of them with "
            f"{shorten(repr(nodes[parts.argmax()]))}; is the file cut off?"
        )


def _trailing_number(name: str) -> tuple[int, str]:
    """Return a sort key: the number at the end of a name, which may have any number of digits."""
    digits = name[len(name.rstrip(string.digits)) :].lstrip("0")
    return len(digits), digits


def _match(pattern: re.Pattern[str], line: str, expected: str) -> re.Match[str]:
    match = pattern.fullmatch(line.strip())
    if match is None:
        raise ProfileError(f"profile: found {shorten(repr(line.strip()))}, expected {expected}")
    return match


def _number(text: str) -> float:
    """Return a number, or the sum of ``[number; number]``, which stands for several outputs."""
    several = text.startswith("[") and text.endswith("]")
    try:
        return sum(float(part) for part in (text[1:-1].split(";") if several else [text]))
    except ValueError as error:
        raise ProfileError(f"profile: found {shorten(repr(text))}, expected a number") from error


def _check_once(items: Iterable[object], what: str) -> None:
    seen = set()
    for item in items:
        if item in seen:
            raise ProfileError(f"profile: {what} {shorten(repr(item))} occurs twice, expected once")
        seen.add(item)
