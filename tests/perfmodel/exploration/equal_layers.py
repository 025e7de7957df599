"""A network of equal layers, and a machine whose links are all alike: what tests of an exploration begin with."""

from __future__ import annotations

from dataclasses import replace

from distconv.perfmodel.machine.links import Link
from distconv.perfmodel.machine.machine import Machine, Overlap
from distconv.perfmodel.profiles.layer_profile import Layer, Profile

LATENCY = 1e-9


def machine_of(bandwidth, memory=1e18, *, overlap=False, per_node=8):
    link = Link(LATENCY, bandwidth)
    lassen = Machine.load("lassen")
    hides = Overlap(halo=overlap, allreduce=overlap)
    return replace(lassen, node=link, network=link, ranks_per_node=per_node, memory_bytes=memory, overlap=hides)


def equal_layers(count=8, activation=8.0, parameters=8.0):
    """Return the profile of equal layers for a mini-batch of 16 samples."""
    return Profile([Layer(f"l{index}", 1.0, 2.0, activation, parameters) for index in range(count)])
