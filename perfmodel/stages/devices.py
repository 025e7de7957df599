"""Kinds of devices that stages are placed on, and what is refused about them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TypeGuard

from distconv.errors import DistconvError
from distconv.perfmodel.machine.units import number
from distconv.text_files import shorten


class PartitionError(DistconvError, ValueError):
    """A partition that cannot be: no devices, an impossible bandwidth, a network that no memory holds."""


@dataclass(frozen=True)
class Device:
    """``count`` devices of one kind. ``times`` has seconds (forward and backward) of each layer on one of them.

    ``times`` is in the order of the profile's ``layers``; None means the profile's own times. ``memory`` is the bytes
    of one device; None means enough.

    Raises
    ------
    PartitionError
        If a figure cannot be.
    """

    name: str
    count: int = 1
    times: Sequence[float] | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.count) or self.count < 1:
            raise PartitionError(f"device {self.name!r}: found count={self.count!r}, expected a positive whole number")
        object.__setattr__(self, "count", int(self.count))
        if self.memory is not None:
            check_positive(self.memory, f"device {self.name!r}: memory", "bytes")
        if self.times is not None:
            if not isinstance(self.times, Iterable):
                raise PartitionError(f"device {self.name!r}: found times={self.times!r}, expected one for each layer")
            times = [number(time) for time in self.times]
            if None in times:
                wrong = times.index(None)
                raise PartitionError(
                    f"device {self.name!r}: found {shorten(repr(self.times[wrong]))} as the time of layer {wrong}, "
                    "expected seconds >= 0"
                )
            if not math.isfinite(sum(time for time in times if time is not None)):
                raise PartitionError(
                    f"device {self.name!r}: the sum of its {len(times)} times is too large for a number"
                )
            object.__setattr__(self, "times", tuple(times))


def as_devices(devices: int | Sequence[Device], layers: int) -> tuple[Device, ...]:
    """One kind for a number of devices, or the list, checked.

    Raises
    ------
    PartitionError
        If there are none, one is no Device, two have one name, or one has times for another number of layers.
    """
    if is_whole(devices):
        if devices < 1:
            raise PartitionError(f"partition: found {devices} devices, expected at least one")
        return (Device("device", int(devices)),)
    if not isinstance(devices, Sequence) or not devices:
        raise PartitionError(f"partition: found devices={devices!r}, expected a number or a list of Device")
    for device in devices:
        if not isinstance(device, Device):
            raise PartitionError(f"partition: found {device!r} among the devices, expected a Device")
        if device.times is not None and len(device.times) != layers:
            raise PartitionError(
                f"device {device.name!r}: found times of {len(device.times)} layers, the profile has {layers}"
            )
    names = [device.name for device in devices]
    if len(set(names)) < len(names):
        raise PartitionError(f"partition: found devices named {', '.join(names)}: each kind once, with its count")
    return tuple(devices)


def kinds_in_order(devices: Sequence[Device]) -> list[int]:
    """The kind of each device, an index into ``devices``.

    >>> kinds_in_order([Device("old", 2), Device("new")])
    [0, 0, 1]
    """
    return [kind for kind, device in enumerate(devices) for _ in range(device.count)]


def check_positive(value: object, what: str, unit: str) -> float:
    """``value`` as a float.

    Raises
    ------
    PartitionError
        If it is not a positive, finite number.
    """
    amount = number(value)
    if not amount:
        raise PartitionError(f"{what}: found {shorten(repr(value))}, expected a positive number of {unit} such as 1e9")
    return amount


def is_whole(value: object) -> TypeGuard[int]:
    """Return True if it is a whole number, NumPy's too, and not True."""
    return isinstance(value, Integral) and not isinstance(value, bool)
