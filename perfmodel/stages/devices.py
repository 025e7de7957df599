"""Kinds of devices that stages are placed on, and checks of them."""

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
    """A partition is impossible: no devices, an invalid bandwidth or number, or too little memory for the network."""


@dataclass(frozen=True)
class Device:
    """Devices of one kind.

    Source: Zhai et al. 2020 (SparsePipe), III-C (heterogeneous devices).

    Attributes
    ----------
    name : str
        Name of the kind.
    count : int
        Number of devices.
    times : sequence of float, optional
        Seconds of each layer, forward and backward, on one device, in the order of ``Profile.layers``. Default: the
        profile's own times.
    memory : float, optional
        Bytes of one device. Default: unlimited.

    Raises
    ------
    PartitionError
        If a value is invalid.
    """

    name: str
    count: int = 1
    times: Sequence[float] | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        if not is_integer(self.count) or self.count < 1:
            raise PartitionError(f"device {self.name!r}: found count={self.count!r}, expected a positive whole number")
        object.__setattr__(self, "count", int(self.count))
        if self.memory is not None:
            check_positive(self.memory, f"device {self.name!r}: memory", "bytes")
        if self.times is not None:
            if not isinstance(self.times, Iterable):
                raise PartitionError(f"device {self.name!r}: found times={self.times!r}, expected one for each layer")
            # None marks a value that is not a finite number >= 0.
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
    """Return a number or a list of devices as a checked tuple of kinds.

    Parameters
    ----------
    devices : int or sequence of Device
        A number stands for one kind.
    layers : int
        Number of layers that ``times`` must have.

    Returns
    -------
    tuple of Device

    Raises
    ------
    PartitionError
        If there are no devices, an element is not a Device, two have one name, or one has times for another number of
        layers.
    """
    if is_integer(devices):
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
        raise PartitionError(f"partition: found devices named {', '.join(names)}. List each kind once, with its count")
    return tuple(devices)


def kinds_in_order(devices: Sequence[Device]) -> list[int]:
    """Return the kind of each device, as an index into ``devices``.

    Parameters
    ----------
    devices : sequence of Device

    Returns
    -------
    list of int
        One entry per device.

    Examples
    --------
    >>> kinds_in_order([Device("old", 2), Device("new")])
    [0, 0, 1]
    """
    return [kind for kind, device in enumerate(devices) for _ in range(device.count)]


def check_positive(value: object, what: str, unit: str) -> float:
    """Return a value as a float, checked to be positive and finite.

    Parameters
    ----------
    value : object
    what : str
        Name of the value in the error message.
    unit : str
        Its unit.

    Returns
    -------
    float

    Raises
    ------
    PartitionError
        If it is not a positive, finite number.
    """
    amount = number(value)
    if not amount:
        raise PartitionError(f"{what}: found {shorten(repr(value))}, expected a positive number of {unit} such as 1e9")
    return amount


def is_integer(value: object) -> TypeGuard[int]:
    """Return True if it is an integer, those of NumPy included, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)
