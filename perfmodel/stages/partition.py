"""Partition of a network into pipeline stages, each on one or more devices that hold replicas.

:func:`partition` selects the devices and layers of each stage by the costs of :mod:`.stage_costs`, for a full pipeline
of any schedule. :func:`.explore` also chooses the schedule.

Source: Narayanan et al. 2019 (PipeDream), 3.1; Zhai et al. 2020 (SparsePipe), III-C; Zhao et al. 2020 (BaPipe), 3.3.

Examples
--------
>>> from distconv.perfmodel.profiles.layer_profile import Layer, Profile
>>> profile = Profile([Layer(name, 1.0, 2.0, activation_bytes=8, parameter_bytes=0) for name in "abcd"])
>>> print(partition(profile, devices=2, bandwidth=1e9, method="exact"))
2 (no cut): 6 s
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
from distconv.perfmodel.stages.dynamic_program import StageMove, any_groups, cheapest_stages, successive_groups
from distconv.perfmodel.stages.memory import fits_devices, no_fit_error
from distconv.perfmodel.stages.stage_costs import (
    COSTS,
    Array,
    Counts,
    PrefixSums,
    StagePartition,
    StageRange,
    check_profile,
    stage_time,
)

__all__ = ["METHODS", "Device", "PartitionError", "StagePartition", "partition", "stage_time"]

METHODS = {"pipedream": "pipedream", "sparsepipe": "sparsepipe", "bapipe": "bapipe", "exact": "sparsepipe"}
"""Methods of :func:`partition`, and the entry of ``COSTS`` that each minimizes."""


def partition(
    profile: Profile, devices: int | Sequence[Device], bandwidth: float, method: str = "pipedream"
) -> StagePartition:
    """Partition a network over all devices for the least time per mini-batch in a full pipeline.

    There are four methods:

    - ``"pipedream"``: the optimizer of PipeDream. It treats all devices as equal, with the profile's times and the
      least memory among them, and assigns them to stages in the order in which they are listed.
    - ``"sparsepipe"``: SparsePipe's Algorithms 1 and 2. Stages take successive devices, slowest kind first.
    - ``"bapipe"``: BaPipe's section 3.3. Each stage has one device, in the listed order; there are no replicas.
    - ``"exact"``: the least time by SparsePipe's Eqs. 4 and 5 over all splits of ``profile.layers`` and all ways to
      assign devices of each kind to stages. The search time grows with the product of (count + 1)(count + 2) / 2 over
      the kinds.

    Source: Narayanan et al. 2019 (PipeDream), 3.1; Zhai et al. 2020 (SparsePipe), III-C; Zhao et al. 2020 (BaPipe),
    3.3.

    Parameters
    ----------
    profile : Profile
        Layers of the network.
    devices : int or sequence of Device
        Number of equal devices, or kinds.
    bandwidth : float
        Bytes per second between any two devices.
    method : {"pipedream", "sparsepipe", "bapipe", "exact"}
        Search and cost.

    Returns
    -------
    StagePartition
        Layers and devices of each stage.

    Raises
    ------
    PartitionError
        If the method, the devices or the bandwidth are invalid, or no partition fits the devices' memory.

    Notes
    -----
    All methods split one order of the layers, that of ``profile.layers``. If wide branches run in parallel, splits that
    no single order contains may carry fewer bytes. On PipeDream's profile of Inception v3 with 4 devices and 1e9
    bytes/s, a random order was more than 10 % faster. With 2, 4 and 8 devices and 1e8, 1e9 and 1e10 bytes/s, the best
    order is up to 3 % faster on the profile of ResNet-50; on the other four profiles no order is faster.
    """
    check_profile("partition", profile)
    if not isinstance(method, str) or method not in METHODS:
        raise PartitionError(f"partition: method={method!r} is not valid. Use one of {', '.join(METHODS)}")
    given = as_devices(devices, len(profile.layers))
    seen = given
    if method == "pipedream":  # all devices are equal, and have the least memory among them
        smallest = min(given, key=lambda device: math.inf if device.memory is None else device.memory)
        seen = (Device(smallest.name, sum(device.count for device in given), memory=smallest.memory),)
    terms = PrefixSums(profile, seen, bandwidth, COSTS[METHODS[method]])
    if method == "bapipe":
        cuts, stages = bapipe.balanced_partition(terms)
    else:
        stages = fastest_stages(terms, allowed_moves(method, terms))
        cuts = [int(stage.first) for stage in stages[1:]]
    counts = _assign_devices(stages, given) if method == "pipedream" else [stage.counts for stage in stages]
    names = [layer.name for layer in profile.layers]
    return StagePartition(
        method=method,
        cuts=tuple(cuts),
        positions=tuple(float(stage.first) for stage in stages[1:]),
        stages=tuple(tuple(names[a:b]) for a, b in pairwise([0, *cuts, terms.size])),
        assignment=tuple(
            {device.name: count for device, count in zip(given, held, strict=True) if count} for held in counts
        ),
        time=terms.time(stages),
    )


def allowed_moves(method: str, terms: PrefixSums) -> list[StageMove]:
    """Return the groups of devices that a method may give to a stage.

    Parameters
    ----------
    method : str
        Key of ``METHODS`` except ``"bapipe"``.
    terms : PrefixSums
        Costs on the devices.

    Returns
    -------
    list of StageMove
        In the order that :func:`.cheapest_stages` requires.
    """
    available = tuple(device.count for device in terms.devices)
    if method != "sparsepipe":
        return list(any_groups(available))
    # sorted is stable: kinds of equal speed keep the listed order.
    slowest_first = sorted(range(len(available)), key=lambda kind: -terms.seconds[kind][-1])
    return list(successive_groups([kind for kind in slowest_first for _ in range(available[kind])], len(available)))


def fastest_stages(terms: PrefixSums, moves: Sequence[StageMove]) -> list[StageRange]:
    """Return the stages with the least time that fit the devices' memory.

    Parameters
    ----------
    terms : PrefixSums
    moves : sequence of StageMove
        Allowed groups of devices.

    Returns
    -------
    list of StageRange

    Raises
    ------
    PartitionError
        If no partition fits.
    """
    first, last = terms.edges[:, None], terms.edges[None, :]
    # Many moves have the same devices, and differ only in the sets of used ones.
    seconds = functools.cache(lambda counts: terms.stage_time(first, last, counts))

    def work(move: StageMove) -> Array:
        if math.isinf(terms.memory_limit(move.counts)):
            return seconds(move.counts)
        return np.where(fits_devices(terms, move, first, last), seconds(move.counts), np.inf)

    stages = cheapest_stages(terms.size, moves, work, lambda move: terms.boundary_time(terms.edges, sum(move.counts)))
    if stages is None:
        raise no_fit_error(terms, moves)
    return stages


def _assign_devices(stages: Sequence[StageRange], devices: Sequence[Device]) -> list[Counts]:
    """Return the devices of each stage, assigned in the order in which they are listed."""
    order = kinds_in_order(devices)
    ends = np.cumsum([0] + [sum(stage.counts) for stage in stages]).tolist()
    held = [order[first:last] for first, last in pairwise(ends)]
    return [tuple(map(kinds.count, range(len(devices)))) for kinds in held]
