"""Random profiles and devices, all their partitions, and what those cost by hand."""

from __future__ import annotations

import itertools
import math
import random

from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from distconv.perfmodel.stages.partition import Device

BANDWIDTH = 50.0


def random_profile(seed, layers=6):
    """Layers with random costs, most of them in a chain, some skipped."""
    draw = random.Random(seed)
    names = [f"n{index}" for index in range(layers)]
    made = [
        Layer(name, draw.uniform(0, 4), draw.uniform(0, 8), draw.randint(0, 400), draw.choice([0, 30, 300]))
        for name in names
    ]
    skips = [(a, b) for a, b in itertools.combinations(names, 2) if draw.random() < 0.15]
    return Profile(made, sorted({*itertools.pairwise(names), *skips}))


def random_devices(seed, layers=6, memory=None):
    draw = random.Random(-1 - seed)
    return [Device(name, draw.randint(1, 2), [draw.uniform(0.5, 12) for _ in range(layers)], memory) for name in "AB"]


def every_partition(layers, devices):
    """All cuts with all ways to give all devices to the stages."""
    for stages in range(1, sum(device.count for device in devices) + 1):
        for cuts in itertools.combinations(range(1, layers), stages - 1):
            for held in split_counts([device.count for device in devices], stages):
                if all(map(sum, held)):
                    yield (
                        list(cuts),
                        [{device.name: n for device, n in zip(devices, counts, strict=True) if n} for counts in held],
                    )


def split_counts(counts, stages):
    if stages == 1:
        yield [tuple(counts)]
        return
    for first in itertools.product(*(range(count + 1) for count in counts)):
        for rest in split_counts([count - taken for count, taken in zip(counts, first, strict=True)], stages - 1):
            yield [first, *rest]


def reference_time(profile, cuts, assignment, devices, bandwidth, cost):
    """The slowest stage or boundary, summed layer by layer."""
    kinds = {device.name: device for device in devices}
    edges = [0, *cuts, len(profile.layers)]
    worst = 0.0
    for (first, last), held in zip(itertools.pairwise(edges), assignment, strict=True):
        inside, before = profile.layers[first:last], {layer.name for layer in profile.layers[:first]}
        m = sum(held.values())
        slowest = max(
            sum((kinds[name].times or [layer.time_s for layer in profile.layers])[first:last]) for name in held
        )
        parameters = sum(layer.parameter_bytes for layer in inside)
        read = {a for a, b in profile.edges if a in before and b not in before}
        unread = before - {a for a, _ in profile.edges}
        carried = sum(layer.activation_bytes for layer in profile.layers if layer.name in read | unread)
        if cost == "pipedream":
            worst = max(worst, (slowest + 4 * (m - 1) * parameters / (m * bandwidth)) / m, 2 * carried / bandwidth / m)
        else:
            worst = max(worst, (slowest + 2 * (m - 1) * parameters / bandwidth) / m, carried / bandwidth)
    return worst


def fits(profile, cuts, assignment, devices):
    """PipeDream's stashing: weights and outputs for each mini-batch in flight, gradients once."""
    edges = [0, *cuts, len(profile.layers)]
    replicas = [sum(held.values()) for held in assignment]
    for index, (first, last) in enumerate(itertools.pairwise(edges)):
        flying = math.ceil(sum(replicas[index:]) / replicas[index])
        inside = profile.layers[first:last]
        parameters = sum(layer.parameter_bytes for layer in inside)
        needed = flying * sum(layer.activation_bytes for layer in inside) + (flying + 1) * parameters
        if any(device.memory < needed for device in devices if device.name in assignment[index]):
            return False
    return True
