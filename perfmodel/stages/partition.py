"""Cuts a network into pipeline stages, each on one or more devices that hold replicas of it.

    >>> from distconv.perfmodel.profiles.layer_profile import Layer, Profile
    >>> profile = Profile([Layer(name, 1.0, 2.0, activation_bytes=8, parameter_bytes=0) for name in "abcd"])
    >>> print(partition(profile, devices=2, bandwidth=1e9, method="exact"))
    2 (no cut): 6 s

Source: Narayanan et al. 2019 (PipeDream), 3.1; Zhai et al. 2020 (SparsePipe), III-C; Zhao et al. 2020 (BaPipe), 3.3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from distconv.perfmodel.profiles.layer_profile import Profile
from distconv.perfmodel.stages import bapipe
from distconv.perfmodel.stages.devices import Device, PartitionError, as_devices, kinds_in_order
from distconv.perfmodel.stages.dynamic_program import Move, any_groups, cheapest, successive_groups
from distconv.perfmodel.stages.memory import does_not_fit, fitting
from distconv.perfmodel.stages.stage_costs import (
    COSTS,
    Array,
    Counts,
    StagePartition,
    StageRange,
    Terms,
    check_profile,
    stage_time,
)

__all__ = ["METHODS", "Device", "PartitionError", "StagePartition", "partition", "stage_time"]

METHODS = {"pipedream": "pipedream", "sparsepipe": "sparsepipe", "bapipe": "bapipe", "exact": "sparsepipe"}
"""The methods, and which of ``COSTS`` each minimises."""


def partition(
    profile: Profile, devices: int | Sequence[Device], bandwidth: float, method: str = "pipedream"
) -> StagePartition:
    """The partition of ``profile`` over all ``devices`` (a number, or kinds) linked by ``bandwidth`` bytes per second.

    ``"pipedream"``: that system's optimizer. It takes all devices for equal, with the profile's times and the least
    memory among them, and gives them out in the order in which they are listed.
    ``"sparsepipe"``: Algorithms 1 and 2; groups follow each other in one order of the devices, slowest kind first.
    ``"bapipe"``: section 3.3; one device per stage, in the order in which they are listed, without replicas.
    ``"exact"``: the least time by SparsePipe's Eqs. 4 and 5 over all cuts of ``profile.layers`` and all ways to give
    devices of each kind to stages. Its cost grows with the product of (count + 1)(count + 2) / 2 over the kinds.

    All methods cut the one order of ``profile.layers``. Where wide branches run side by side, cuts across them that no
    single order has may be narrower: on PipeDream's profile of Inception v3 with 4 devices and 1e9 bytes/s an order
    drawn at random was more than 10 % faster. Over 2, 4 and 8 devices and 1e8, 1e9 and 1e10 bytes/s the best of all
    orders is up to 3 % faster on its profile of ResNet-50, and none is on the other four
    (tests/perfmodel/stages/test_partition.py).

    Raises
    ------
    PartitionError
        If there is no such method, the devices or the bandwidth cannot be, or no partition fits their memory.
    """
    check_profile("partition", profile)
    if not isinstance(method, str) or method not in METHODS:
        raise PartitionError(f"partition: there is no method {method!r}; there are {', '.join(METHODS)}")
    given = as_devices(devices, len(profile.layers))
    seen = _taken_for_equal(given) if method == "pipedream" else given
    terms = Terms(profile, seen, bandwidth, COSTS[METHODS[method]])
    if method == "bapipe":
        cuts, stages = bapipe.balanced(terms)
    else:
        stages = least(terms, moves_of(method, terms))
        cuts = [int(stage.first) for stage in stages[1:]]
    counts = _given_out(stages, given) if method == "pipedream" else [stage.counts for stage in stages]
    return _result(method, terms, cuts, stages, _named(counts, given))


def moves_of(method: str, terms: Terms) -> list[Move]:
    """The groups of devices that a method looks at."""
    available = tuple(device.count for device in terms.devices)
    if method != "sparsepipe":
        return list(any_groups(available))
    slowest_first = sorted(range(len(available)), key=lambda kind: -terms.seconds[kind][-1])
    return list(successive_groups([kind for kind in slowest_first for _ in range(available[kind])], len(available)))


def least(terms: Terms, moves: Sequence[Move]) -> list[StageRange]:
    """The stages of least time among those that fit the memory."""
    first, last = terms.edges[:, None], terms.edges[None, :]
    seconds = functools.cache(lambda counts: terms.stage(first, last, counts))

    def work(move: Move) -> Array:
        if math.isinf(terms.room(move.counts)):
            return seconds(move.counts)
        return np.where(fitting(terms, move, first, last), seconds(move.counts), np.inf)

    stages = cheapest(terms.size, moves, work, lambda move: terms.boundary(terms.edges, sum(move.counts)))
    if stages is None:
        raise does_not_fit(terms, moves)
    return stages


def _taken_for_equal(devices: Sequence[Device]) -> tuple[Device, ...]:
    smallest = min(devices, key=lambda device: math.inf if device.memory is None else device.memory)
    return (Device(smallest.name, sum(device.count for device in devices), memory=smallest.memory),)


def _given_out(stages: Sequence[StageRange], devices: Sequence[Device]) -> list[Counts]:
    """Devices in the order in which they are listed, as many to each stage as it has."""
    order = kinds_in_order(devices)
    ends = np.cumsum([0] + [sum(stage.counts) for stage in stages]).tolist()
    held = [order[first:last] for first, last in pairwise(ends)]
    return [tuple(map(kinds.count, range(len(devices)))) for kinds in held]


def _named(counts: Sequence[Counts], devices: Sequence[Device]) -> tuple[dict[str, int], ...]:
    return tuple({device.name: count for device, count in zip(devices, held, strict=True) if count} for held in counts)


def _result(
    method: str, terms: Terms, cuts: Sequence[int], stages: Sequence[StageRange], assignment: tuple[dict[str, int], ...]
) -> StagePartition:
    edges = [0, *cuts, terms.size]
    names = [layer.name for layer in terms.profile.layers]
    return StagePartition(
        method=method,
        cuts=tuple(cuts),
        positions=tuple(float(stage.first) for stage in stages[1:]),
        stages=tuple(tuple(names[a:b]) for a, b in pairwise(edges)),
        assignment=assignment,
        time=terms.time(stages),
    )
