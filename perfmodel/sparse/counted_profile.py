"""``counted_profile``: a layer profile of a sparse network from the sites of an example, without a run in time."""

from __future__ import annotations

from collections import Counter

from distconv.arrangement import Arrangement
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from distconv.perfmodel.sparse.recording import SiteOperation, SparseRecording
from distconv.perfmodel.sparse.site_costs import SiteCosts


def counted_profile(recording: SparseRecording, machine: Machine) -> Profile:
    """Each recorded operation on one rank of ``machine`` as a layer; the first that needs a kernel map builds it.

    The second operation of a layer is ``name#2``. The same example gives the same figures on every rank and in every
    run, which measured times would not.
    """
    costs = SiteCosts(recording, machine, Arrangement())
    builders = set(costs.first_of_maps())
    layers, calls = list[Layer](), Counter[str]()
    for op in recording.operations:
        calls[op.name] += 1
        label = op.name if calls[op.name] == 1 else f"{op.name}#{calls[op.name]}"
        forward = costs.forward(op) + (costs.map_time(op) if op in builders else 0.0)
        held = recording.itemsize * op.parameters
        layers.append(Layer(label, forward, costs.backward(op), _output_bytes(recording, op), held))
    return Profile(layers)


def _output_bytes(recording: SparseRecording, op: SiteOperation) -> int:
    """Features and, where sites are not pooled, their coordinates."""
    if op.kind in ("global_pool", "head"):
        return op.samples * op.filters * recording.itemsize
    coords = op.outputs.coords
    return coords.nbytes + len(coords) * op.filters * recording.itemsize
