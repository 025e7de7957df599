"""``counted_profile``: a layer profile of a sparse network from the sites of an example, without measuring time."""

from __future__ import annotations

from collections import Counter

from distconv.arrangement import Arrangement
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from distconv.perfmodel.sparse.recording import SiteOperation, SparseRecording
from distconv.perfmodel.sparse.site_costs import SiteCosts


def counted_profile(recording: SparseRecording, machine: Machine) -> Profile:
    """Return each recorded operation as a layer on one rank of a machine.

    The first operation that needs a kernel map includes the time to build it. Unlike measured times, the result is
    identical on all ranks and in all runs.

    Parameters
    ----------
    recording : SparseRecording
    machine : Machine

    Returns
    -------
    Profile
        The second operation of a layer is named ``name#2``.
    """
    costs = SiteCosts(recording, machine, Arrangement())
    # Operations compare by identity.
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
    """Return the bytes of the features and, unless sites are pooled, of their coordinates."""
    if op.kind in ("global_pool", "head"):
        return op.samples * op.filters * recording.itemsize
    coords = op.outputs.coords
    return coords.nbytes + len(coords) * op.filters * recording.itemsize
