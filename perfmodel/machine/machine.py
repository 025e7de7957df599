"""Machine model: links, memory and compute of its ranks.

The cost model and the exploration read it. It is independent of networks and plans. A YAML file describes a machine,
with units on all quantities::

    name: lassen
    ranks_per_node: 4
    memory: 16 GB                                          # of one rank
    on_chip: 43 MB                                         # part of it where weights can stay (FPGAs; optional)
    links:
      node: {latency: 10 us, bandwidth: 75 GB/s}           # between ranks of a node
      network: {latency: 10 us, bandwidth: 6.25 GB/s}      # between nodes, fraction of one rank; step: see Link
    overlap: {halo: true, allreduce: true}                 # true if it overlaps with compute
    compute:
    - busy: 1                                              # while this many ranks of a node compute
      roofline: {flops: 15.7 TFLOP/s, bandwidth: 900 GB/s, kernel: 10 us}  # and small, exchange, gradient: see Roofline
      table_s: {a key: 0.0032}                             # measured times in seconds (optional)
    kinds:                                                 # other devices than those above (optional)
      titanxp: {memory: 12 GB, roofline: {flops: 12.1 TFLOP/s, bandwidth: 547 GB/s, kernel: 10 us}}
    modes:                                                 # other memory formats and captured steps (optional)
      channels_last, captured: [{busy: 1, roofline: {...}, table_s: {...}}]

Source: Dryden et al. 2019, II-B, V-A, VI; Zhao et al. 2020 (BaPipe), 4.3, for FPGAs; Zhai et al. 2020 (SparsePipe),
III-C, for kinds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta
from msgspec.structs import asdict, fields

from distconv.errors import MachineError
from distconv.perfmodel.machine import collectives
from distconv.perfmodel.machine.collectives import SUM_PASSES, Levels, LinkLevel
from distconv.perfmodel.machine.links import Link, RankGroup
from distconv.perfmodel.machine.step_mode import MODES, StepMode
from distconv.perfmodel.machine.units import Bandwidth, Elements, Memory, Quantity, Rate, Time
from distconv.text_files import File, describe_value, load, parse_yaml
from distconv.whole_files import write_file

__all__ = ["Compute", "DeviceKind", "Link", "Machine", "Overlap", "RankGroup", "Roofline"]

_BUILT_IN = Path(__file__).with_name("builtin")


@dataclass(frozen=True)
class Overlap:
    """Communication that the transport overlaps with computation.

    Attributes
    ----------
    halo : bool
        True if halo exchanges overlap. Otherwise computation waits for them.
    allreduce : bool
        True if gradient all-reduces overlap. Otherwise computation waits for them.
    """

    halo: bool
    allreduce: bool


@dataclass(frozen=True)
class Roofline:
    """Time of a kernel that was not measured: its arithmetic or its memory traffic, whichever takes longer.

    A result of fewer than ``small`` elements uses only the fraction ``elements / small`` of the device. The rate is
    multiplied by this fraction to the power ``unfilled``. The power is 1 if the tiles of the result keep their size, so
    that multiprocessors stay idle. It is 1/2 if tiles shrink until each multiprocessor has one, because the memory
    traffic of a matrix product per result grows with the inverse of a tile's edge. Libraries have tiles of a few sizes,
    so the default lies halfway.

    Source: Williams, Waterman, Patterson 2009; Dryden et al. 2019, VI-A (fixed kernel overheads).

    Attributes
    ----------
    flops_per_s : float
        Floating-point operations per second.
    bytes_per_s : float
        Memory bandwidth, bytes per second.
    kernel_s : float
        Fixed cost of each kernel, seconds.
    small : float
        Elements of a result that fill the device; 0 if any result fills it.
    exchange_s : float
        Fixed cost of each exchange with neighbours beyond its messages: work of the framework, packing, and waiting for
        ranks that are not ready.
    gradient_s : float
        Fixed cost of each parameter whose gradient is summed over ranks, seconds.
    unfilled : float
        Power of the filled fraction.
    """

    flops_per_s: float
    bytes_per_s: float
    kernel_s: float
    small: float = 0.0
    exchange_s: float = 0.0
    gradient_s: float = 0.0
    unfilled: float = 0.75

    def time(self, flops: float, nbytes: float, elements: float) -> float:
        """Return the time of a kernel.

        Parameters
        ----------
        flops : float
            Floating-point operations.
        nbytes : float
            Bytes read and written.
        elements : float
            Elements of the result; infinity for a result that fills the device.

        Returns
        -------
        float
            Seconds.

        Examples
        --------
        >>> Roofline(flops_per_s=10.0, bytes_per_s=1.0, kernel_s=0.5, small=160.0).time(100.0, 4.0, 10.0)
        80.5
        """
        # At least one element: an empty result would divide by zero.
        filled = min(1.0, max(elements, 1.0) / self.small) if self.small else 1.0
        seconds: float = max(flops / self.flops_per_s, nbytes / self.bytes_per_s) / filled**self.unfilled
        return self.kernel_s + seconds


@dataclass(frozen=True)
class Compute:
    """Compute of one rank while ``busy`` ranks of its node compute: measured times, and a roofline for the rest.

    Attributes
    ----------
    busy : int
        Ranks of the node that compute at the same time.
    roofline : Roofline
        Estimate for everything that is not in the table.
    table : mapping of str to float
        Measured seconds. The measuring and the reading code agree on the keys, which are opaque to this module.
    """

    busy: int
    roofline: Roofline
    table: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class DeviceKind:
    """Kind of device of a machine, other than the one of ``Machine.compute``.

    Attributes
    ----------
    memory_bytes : float
        Memory of one device.
    roofline : Roofline
        Compute of one device.
    """

    memory_bytes: float
    roofline: Roofline


@dataclass(frozen=True)
class Machine:
    """Nodes of equal ranks, the links between them, and what a rank computes.

    Attributes
    ----------
    name : str
    ranks_per_node : int
    memory_bytes : float
        Memory of one rank.
    node : Link
        Link between two ranks of a node.
    network : Link
        One rank's fraction of its node's link to the other nodes, while all ranks of the node use that link.
    overlap : Overlap
        Communication that overlaps with computation.
    compute : tuple of Compute
        In increasing order of ``busy``; the first entry has ``busy=1``.
    on_chip_bytes : float
        Memory next to the compute units of a rank, in which weights can stay from one sample to the next; 0 if there
        are only caches.
    kinds : mapping of str to DeviceKind
        Other kinds of devices, by name.
    modes : mapping of str to tuple of Compute
        Compute in other modes than contiguous eager steps, by :attr:`.StepMode.name`.

    Raises
    ------
    MachineError
        If a name of ``modes`` is not that of a mode, or if ``compute`` or an entry of ``modes`` does not start with
        ``busy=1``, is not increasing, or exceeds ``ranks_per_node``.

    Examples
    --------
    >>> Machine.load("lassen").ranks_per_node
    4
    """

    name: str
    ranks_per_node: int
    memory_bytes: float
    node: Link
    network: Link
    overlap: Overlap
    compute: tuple[Compute, ...]
    on_chip_bytes: float = 0.0
    kinds: Mapping[str, DeviceKind] = field(default_factory=dict, hash=False)
    modes: Mapping[str, tuple[Compute, ...]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        known = [mode.name for mode in MODES[1:]]
        for name, entries in self.modes.items():
            if name not in known:
                raise MachineError(
                    f"machine {self.name}: modes: {describe_value(name)} is not a mode of steps. Use one of "
                    f"{'; '.join(known)}"
                )
            replace(self, compute=entries, modes={})  # checks the entries
        busy = [entry.busy for entry in self.compute]
        if busy[:1] != [1] or busy != sorted(set(busy)) or busy[-1] > self.ranks_per_node:
            raise MachineError(
                f"machine {self.name}: compute: found entries for busy={busy}, expected 1 and then increasing numbers "
                f"up to ranks_per_node={self.ranks_per_node}"
            )

    # -- times --------------------------------------------------------------------------------------------------------

    def send(self, nbytes: float, across: bool) -> float:
        """Return the time in which two ranks send each other ``nbytes``.

        Parameters
        ----------
        nbytes : float
            Bytes in each direction.
        across : bool
            True if the ranks are on different nodes. Otherwise they share a node.

        Returns
        -------
        float
            Seconds.
        """
        return (self.network if across else self.node).send(nbytes)

    def allreduce(self, group: RankGroup, nbytes: float) -> float:
        """Return the time of an all-reduce.

        Parameters
        ----------
        group : RankGroup
            Ranks that take part.
        nbytes : float
            Bytes on each rank.

        Returns
        -------
        float
            Seconds; 0 for one rank or no bytes.
        """
        return collectives.allreduce(self.levels(group), nbytes)

    def allgather(self, group: RankGroup, bytes_total: float) -> float:
        """Return the time of an allgather.

        Parameters
        ----------
        group : RankGroup
            Ranks that take part.
        bytes_total : float
            Bytes on each rank afterwards.

        Returns
        -------
        float
            Seconds; 0 for one rank or no bytes.
        """
        return collectives.allgather(self.levels(group), bytes_total)

    def reduce_scatter(self, group: RankGroup, bytes_total: float) -> float:
        """Return the time of a reduce-scatter.

        Parameters
        ----------
        group : RankGroup
            Ranks that take part.
        bytes_total : float
            Bytes on each rank before.

        Returns
        -------
        float
            Seconds; 0 for one rank or no bytes.
        """
        return collectives.reduce_scatter(self.levels(group), bytes_total)

    def computing(self, ranks: int) -> Compute:
        """Return the compute of a rank while ``ranks`` ranks of its node compute.

        Parameters
        ----------
        ranks : int
            Ranks that compute at the same time.

        Returns
        -------
        Compute
            The last entry with ``busy <= ranks``.
        """
        return [entry for entry in self.compute if entry.busy <= ranks][-1]

    def at_work(self, ranks: int) -> Machine:
        """Return the machine with the compute of a rank while ``ranks`` ranks of its node compute.

        Use it where fewer ranks share a layer than compute at the same time.

        Parameters
        ----------
        ranks : int
            Ranks that compute; more than ``ranks_per_node`` count as all ranks of a node.

        Returns
        -------
        Machine
            With a single entry of ``compute``.
        """
        entry = replace(self.computing(min(ranks, self.ranks_per_node)), busy=1)
        return replace(self, compute=(entry,), modes={})

    def in_mode(self, mode: StepMode) -> Machine:
        """Return the machine with the compute of steps in a mode.

        Parameters
        ----------
        mode : StepMode
            Memory format, and eager or captured steps.

        Returns
        -------
        Machine
            Without other modes; this machine for contiguous eager steps.

        Raises
        ------
        MachineError
            If the machine was not measured in this mode.
        """
        if mode == StepMode():
            return self
        if mode.name not in self.modes:
            there = "; ".join([StepMode().name, *self.modes])
            raise MachineError(
                f"machine {self.name}: not measured for steps that are {mode.name}; there are {there}. Measure it with "
                f"distconv profile{mode.options}"
            )
        return replace(self, compute=self.modes[mode.name], modes={})

    def with_mode(self, mode: StepMode, compute: tuple[Compute, ...]) -> Machine:
        """Return the machine with other compute for steps in a mode.

        Parameters
        ----------
        mode : StepMode
        compute : tuple of Compute
            Entries as in :class:`Machine`.

        Returns
        -------
        Machine
        """
        if mode == StepMode():
            return replace(self, compute=compute)
        return replace(self, modes={**self.modes, mode.name: compute})

    def by_roofline(self) -> Machine:
        """Return the machine without its measured times."""
        return replace(self, compute=tuple(replace(entry, table={}) for entry in self.compute), modes={})

    def of_kind(self, name: str) -> Machine:
        """Return the machine with all devices of one of its ``kinds``.

        Parameters
        ----------
        name : str
            Kind of device.

        Returns
        -------
        Machine
            With the memory and roofline of the kind, and without measured times, kinds and modes.

        Raises
        ------
        MachineError
            If the machine does not have this kind.
        """
        if name not in self.kinds:
            there = f"there are {', '.join(self.kinds)}" if self.kinds else "all of its devices are of one kind"
            raise MachineError(f"machine {self.name}: there is no kind of device {describe_value(name)}; {there}")
        kind = self.kinds[name]
        return replace(self, memory_bytes=kind.memory_bytes, compute=(Compute(1, kind.roofline),), kinds={}, modes={})

    def levels(self, group: RankGroup) -> Levels:
        """Return the levels of links of a group, as the functions of :mod:`.collectives` take them.

        Parameters
        ----------
        group : RankGroup
            Ranks that communicate.

        Returns
        -------
        Levels
            Ranks per link, and the time to add bytes.
        """
        # Ranks of a node that add at the same time share its memory bandwidth.
        near = min(group.ranks, group.per_node)
        gamma = SUM_PASSES / self.computing(near).roofline.bytes_per_s
        link = self.node if group.nodes == 1 else self.network
        return Levels(
            flat=LinkLevel(group.ranks, link, gamma),
            node=LinkLevel(near, self.node, gamma),
            across=LinkLevel(group.nodes, self.network, gamma),
        )

    # -- files --------------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> Machine:
        """Return a built-in machine, or the machine that a YAML file describes.

        Parameters
        ----------
        name_or_path : str or path
            Name such as ``"lassen"``, or path of a file such as ``"./machine.yaml"``.

        Returns
        -------
        Machine

        Raises
        ------
        MachineError
            If there is no such machine or file, or a value of the file is invalid; the message names the key.
        """
        if name_or_path in built_in():
            path = _BUILT_IN / f"{name_or_path}.yaml"
        else:
            path = Path(name_or_path)
            # A bare word is a misspelled name rather than a path.
            if len(path.parts) == 1 and not path.suffix and not os.path.exists(path):
                raise MachineError(
                    f"machine {describe_value(str(path))}: no built-in machine has this name "
                    f"({', '.join(built_in())}). Pass one of them, or the path of a file, such as ./machine.yaml"
                )
        return _from_file(load(path, _MachineFile, "machine", MachineError, parse_yaml))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that :meth:`load` reads as an equal machine.

        Parameters
        ----------
        path : str or path
            File to write.

        Raises
        ------
        MachineError
            If a quantity is not positive and finite, where one is required.
        """
        content = msgspec.to_builtins(_to_file(self), enc_hook=Quantity.encode)
        # In C, if PyYAML was built with it: tables have thousands of keys. A large width keeps each key on one line.
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        write_file(path, yaml.dump(content, Dumper=dumper, sort_keys=False, allow_unicode=True, width=1 << 20))


def built_in() -> list[str]:
    """Return the names of the machines that are part of distconv.

    Returns
    -------
    list of str
        In alphabetical order.
    """
    return sorted(path.stem for path in _BUILT_IN.glob("*.yaml"))


# -- files ------------------------------------------------------------------------------------------------------------

# Keys have no units, since their values carry them. Only the table has plain numbers, of seconds.
_KEYS = {
    **{f"{name}_s": name for name in ("latency", "step", "kernel", "exchange", "gradient")},
    **{f"{name}_bytes": name for name in ("memory", "on_chip")},
    **{"bandwidth_bytes_per_s": "bandwidth", "bytes_per_s": "bandwidth", "flops_per_s": "flops", "table": "table_s"},
}
_Text = Annotated[str, Meta(pattern=r"\S", description="text")]
_Count = Annotated[int, Meta(ge=1, lt=1 << 31, description="a positive whole number")]
_Seconds = Annotated[
    float, Meta(gt=0.0, le=sys.float_info.max, description="a positive number of seconds such as 0.0032")
]


_Power = Annotated[float, Meta(ge=0.0, le=sys.float_info.max, description="a number from 0 on")]
_NONE: dict[Any, Any] = {kind: kind(0.0) for kind in (Time, Memory, Elements)}
"""Default quantities, one object per class: msgspec omits a default that is identical, not equal."""


# Fields are named as in the classes above, keys as in a file.
class _Link(File, omit_defaults=True, rename=_KEYS):
    latency_s: Time
    bandwidth_bytes_per_s: Bandwidth
    step_s: Time | None = None


class _Links(File):
    node: _Link
    network: _Link


class _Overlap(File):
    halo: bool
    allreduce: bool


class _Roofline(File, omit_defaults=True, rename=_KEYS):
    flops_per_s: Rate
    bytes_per_s: Bandwidth
    kernel_s: Time
    small: Elements = _NONE[Elements]
    exchange_s: Time = _NONE[Time]
    gradient_s: Time = _NONE[Time]
    unfilled: _Power = Roofline.unfilled


class _Compute(File, omit_defaults=True, rename=_KEYS):
    busy: _Count
    roofline: _Roofline
    table: dict[str, _Seconds] = msgspec.field(default_factory=dict)


class _DeviceKind(File, rename=_KEYS):
    memory_bytes: Memory
    roofline: _Roofline


class _MachineFile(File, omit_defaults=True, rename=_KEYS, kw_only=True):
    name: _Text
    ranks_per_node: _Count
    memory_bytes: Memory
    on_chip_bytes: Memory = _NONE[Memory]
    links: _Links
    overlap: _Overlap
    compute: Annotated[list[_Compute], Meta(min_length=1, description="a list of mappings")]
    kinds: dict[str, _DeviceKind] = msgspec.field(default_factory=dict)
    modes: dict[str, Annotated[list[_Compute], Meta(min_length=1, description="a list of mappings")]] = msgspec.field(
        default_factory=dict
    )


def _from_file(file: _MachineFile) -> Machine:
    return Machine(
        name=file.name,
        ranks_per_node=file.ranks_per_node,
        memory_bytes=file.memory_bytes,
        node=Link(**asdict(file.links.node)),
        network=Link(**asdict(file.links.network)),
        overlap=Overlap(**asdict(file.overlap)),
        compute=_compute(file.compute),
        on_chip_bytes=file.on_chip_bytes,
        kinds={
            name: DeviceKind(each.memory_bytes, Roofline(**asdict(each.roofline))) for name, each in file.kinds.items()
        },
        modes={name: _compute(entries) for name, entries in file.modes.items()},
    )


def _compute(entries: Sequence[_Compute]) -> tuple[Compute, ...]:
    return tuple(Compute(each.busy, Roofline(**asdict(each.roofline)), each.table) for each in entries)


def _to_file(machine: Machine) -> _MachineFile:
    # By the keys of a file. `links` is read from the machine itself, which has the attributes `node` and `network`.
    names = {field.name: field.encode_name for field in fields(_MachineFile)}
    content = {key: machine if name == "links" else getattr(machine, name) for name, key in names.items()}
    content["compute"] = _plain_tables(machine.compute)
    content["modes"] = {name: _plain_tables(entries) for name, entries in machine.modes.items()}
    try:
        return msgspec.convert(content, _MachineFile, from_attributes=True, dec_hook=_quantity)
    except msgspec.ValidationError as error:
        raise MachineError(f"machine {machine.name} cannot be written: {error}") from None


def _plain_tables(entries: Sequence[Compute]) -> list[Compute]:
    return [replace(each, table={key: float(s) for key, s in each.table.items()}) for each in entries]


def _quantity(kind: type[Quantity], amount: float) -> Quantity:
    return kind(amount) if amount or kind not in _NONE else _NONE[kind]
