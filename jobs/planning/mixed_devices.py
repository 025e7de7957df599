"""Stages over several device types: profiles in a folder, SparsePipe's partition, and the pipeline plan.

Used by ``distconv explore --devices``::

    FOLDER/titanxp.json, FOLDER/v100.json     as distconv profile --layers --devices writes them
    stages of layers on devices of each type  by Algorithms 1 and 2
    pipeline plan                             PipeDream's schedule, and the device type of each rank

Source: Zhai et al. 2020 (SparsePipe), III-A, III-C.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distconv.errors import DistconvError
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.profiles.joined_layers import join_layers
from distconv.perfmodel.profiles.layer_profile import Profile, ProfileError
from distconv.perfmodel.profiles.predicted_profile import predicted_profile
from distconv.perfmodel.stages.devices import Device
from distconv.perfmodel.stages.partition import StagePartition, partition
from distconv.perfmodel.stages.stage_costs import stage_time
from distconv.pipeline import PipelinePlan

METHODS = ("sparsepipe", "pipedream", "exact")
SCHEDULE = "pipedream"


@dataclass(frozen=True)
class DeviceMix:
    """Device types with the times of a network's layers on each, linked by ``bandwidth`` bytes/s."""

    profile: Profile
    """Profile of the layers on the first device type. All types have the same layers."""
    devices: Sequence[Device]
    bandwidth: float

    def choose_stages(self, method: str) -> StagePartition:
        """Partition the network by one of ``METHODS``."""
        return partition(self.profile, self.devices, self.bandwidth, method)

    def seconds(self, stages: StagePartition) -> float:
        """Return the seconds of a mini-batch by SparsePipe's Eqs. 4 and 5, which account for device types."""
        return stage_time(self.profile, stages, self.devices, self.bandwidth)


def combine_profiles(
    kinds: Mapping[str, int],
    machine: Machine,
    profiles: Mapping[str, Profile],
    cuts: Sequence[str],
    memory: float | None,
) -> DeviceMix:
    """Combine the profiles of a network on several device types.

    Parameters
    ----------
    kinds : mapping
        Number of devices of each type.
    machine : Machine
        Machine with the bandwidths of the links.
    profiles : mapping
        Profile of the network on each type.
    cuts : sequence of str
        Layers at which the network may be split.
    memory : float or None
        Bytes per device (None: as the machine describes the type, or the machine's own).

    Returns
    -------
    DeviceMix

    Raises
    ------
    DistconvError
        If the profiles are of different layers.
    """
    blocks = {kind: join_layers(profiles[kind], cuts) for kind in kinds}
    names = {kind: [layer.name for layer in each.layers] for kind, each in blocks.items()}
    first = next(iter(kinds))
    for kind in kinds:
        if names[kind] != names[first]:
            raise DistconvError(
                f"--profiles: {kind} and {first} have different layers or split points "
                f"({len(profiles[kind].layers)} layers and {len(names[kind])} split points; "
                f"{len(profiles[first].layers)} and {len(names[first])}). Profile the same network with the same "
                "mini-batch on all device types."
            )
    rooms = {
        kind: machine.kinds[kind].memory_bytes if kind in machine.kinds else machine.memory_bytes for kind in kinds
    }
    devices = [
        Device(kind, count, [layer.time_s for layer in blocks[kind].layers], memory or rooms[kind])
        for kind, count in kinds.items()
    ]
    # One bandwidth for all links: that of the network as soon as any two ranks are on different nodes.
    near = sum(kinds.values()) <= machine.ranks_per_node
    return DeviceMix(blocks[first], devices, (machine.node if near else machine.network).bandwidth_bytes_per_s)


def load_profiles(folder: Path, kinds: Mapping[str, int]) -> dict[str, Profile]:
    """Load the layer profile of each device type.

    Parameters
    ----------
    folder : pathlib.Path
        Folder with a file ``TYPE.json`` for each type.
    kinds : mapping
        Number of devices of each type.

    Returns
    -------
    dict of str to Profile

    Raises
    ------
    ProfileError
        If a profile is missing or invalid.
    """
    missing = [kind for kind in kinds if not (folder / f"{kind}.json").exists()]
    if missing:
        raise ProfileError(
            f"--profiles {folder}: no {missing[0]}.json. Write a profile of each device type with distconv "
            "profile --layers --devices."
        )
    return {kind: Profile.load(folder / f"{kind}.json") for kind in kinds}


def predict_profiles(graph: LayerGraph, machine: Machine, kinds: Mapping[str, int]) -> dict[str, Profile]:
    """Predict the network's profile on each device type from the machine's description.

    Parameters
    ----------
    graph : LayerGraph
    machine : Machine
    kinds : mapping
        Number of devices of each type.

    Returns
    -------
    dict of str to Profile

    Raises
    ------
    MachineError
        If the machine does not describe a type.
    """
    return {kind: predicted_profile(graph, machine.of_kind(kind)) for kind in kinds}


def to_pipeline_plan(chosen: StagePartition, model: str, batch: int) -> PipelinePlan:
    """Return the pipeline plan of a partition.

    Ranks are assigned stage by stage, and within a stage device type by device type.

    Parameters
    ----------
    chosen : StagePartition
    model : str
        Name of the model, as in ``--model``.
    batch : int
        Samples of a mini-batch.

    Returns
    -------
    PipelinePlan
    """
    held = [[kind for kind, count in stage.items() for _ in range(count)] for stage in chosen.assignment]
    kinds = [kind for stage in held for kind in stage]
    return PipelinePlan(
        model=model,
        batch=batch,
        ranks=len(kinds),
        cuts=tuple(stage[0] for stage in chosen.stages[1:]),
        replicas=chosen.replicas,
        plans=(None,) * len(held),
        schedule=SCHEDULE,
        kinds=tuple(kinds),
    )


def report_lines(setting: DeviceMix, method: str, chosen: StagePartition) -> Iterator[str]:
    """Yield the report: chosen stages, their devices, and the times of the other methods.

    Parameters
    ----------
    setting : DeviceMix
    method : str
        Method of the choice.
    chosen : StagePartition

    Yields
    ------
    str
        A line.
    """
    yield f"{SCHEDULE}, {_shape(chosen)}: {1e3 * setting.seconds(chosen):.3f} ms a mini-batch in the full pipeline"
    ends = ["the input", *(stage[0] for stage in chosen.stages[1:]), "the output"]
    for index, held in enumerate(chosen.assignment):
        on = " and ".join(f"{count} x {kind}" for kind, count in held.items())
        yield f"stage {index}, {ends[index]} to {ends[index + 1]}: on {on}"
    for other in METHODS:
        if other != method:
            theirs = setting.choose_stages(other)
            ratio = setting.seconds(theirs) / setting.seconds(chosen)
            cuts = ", ".join(stage[0] for stage in theirs.stages[1:]) or "no cut"
            time_ms = 1e3 * setting.seconds(theirs)
            yield f"{other}: {_shape(theirs)} ({cuts}) {time_ms:.3f} ms, {ratio:.2f} times as long"


def _shape(stages: StagePartition) -> str:
    return "stages of " + "-".join(map(str, stages.replicas)) + " devices"
