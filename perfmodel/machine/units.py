"""Quantities that carry their units in files and on the command line, such as ``latency: 1.5 us``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from numbers import Real
from typing import ClassVar, TypeVar

from distconv.errors import MachineError

Q = TypeVar("Q", bound="Quantity")

_DECIMAL = {"": "1", "k": "1e3", "M": "1e6", "G": "1e9", "T": "1e12"}
_BYTES = {f"{prefix}B": size for prefix, size in _DECIMAL.items()} | {
    "KiB": str(1 << 10),
    "MiB": str(1 << 20),
    "GiB": str(1 << 30),
}
_QUANTITY = re.compile(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]+)\s*")


class Quantity(float):
    """Quantity in base units.

    Attributes
    ----------
    kind : str
        Description for error messages.
    units : mapping of str to str
        Number of base units in each unit, as exact decimals.
    """

    kind: ClassVar[str]
    units: ClassVar[Mapping[str, str]]

    @classmethod
    def decode(cls: type[Q], value: object) -> Q:
        """Return the quantity that is written as ``value``: positive, with one of the units.

        Raises
        ------
        ValueError
            If it is not; the message names the expected form.

        Examples
        --------
        >>> Time.decode("1.5 us"), Memory.decode("2 GiB")
        (1.5e-06, 2147483648.0)
        """
        match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
        # A float has a smaller range than a Decimal, so the Decimal below is finite, too.
        if match and match[2] in cls.units and 0.0 < float(match[1]) < math.inf:
            # Decimals, because in floats 1.5 times 1e-6 is not the float nearest to 1.5e-6 in general.
            amount = float(Decimal(match[1]) * Decimal(cls.units[match[2]]))
            if 0.0 < amount < math.inf:
                return cls(amount)
        raise ValueError(f"{cls.kind} (units: {', '.join(cls.units)})")

    def encode(self) -> str:
        """Return the quantity in the largest decimal unit that it reaches; :meth:`decode` returns the same float.

        Raises
        ------
        MachineError
            If the value is not positive and finite.

        Examples
        --------
        >>> Time(1.5e-06).encode(), Bandwidth(12.5e9).encode()
        ('1.5 us', '12.5 GB/s')
        """
        if not 0.0 < self < math.inf:
            raise MachineError(f"machine: {self} cannot be written: it must be positive and finite")
        # repr is the shortest decimal that is read as the same float. Binary prefixes are for reading only.
        exact = Decimal(repr(float(self)))
        sizes = {unit: Decimal(size) for unit, size in self.units.items() if not unit.startswith(("Ki", "Mi", "Gi"))}
        reached = [unit for unit, size in sizes.items() if size <= exact] or [min(sizes, key=lambda unit: sizes[unit])]
        unit = max(reached, key=lambda unit: sizes[unit])
        return f"{(exact / sizes[unit]).normalize():f} {unit}"


class Time(Quantity):
    """Seconds."""

    kind = "a time such as '1.5 us'"
    units: ClassVar = {"s": "1", "ms": "1e-3", "us": "1e-6", "ns": "1e-9"}


class Memory(Quantity):
    """Bytes."""

    kind = "a memory size such as '16 GB'"
    units: ClassVar = _BYTES


class Bandwidth(Quantity):
    """Bytes per second."""

    kind = "a bandwidth such as '12.5 GB/s'"
    units: ClassVar = {f"{unit}/s": size for unit, size in _BYTES.items()}


class Rate(Quantity):
    """Floating-point operations per second."""

    kind = "a rate such as '15.7 TFLOP/s'"
    units: ClassVar = {f"{prefix}FLOP/s": size for prefix, size in _DECIMAL.items()}


class Elements(Quantity):
    """Elements of a tensor."""

    kind = "a number such as '160000 elements'"
    units: ClassVar = {"elements": "1"}


def number(value: object) -> float | None:
    """Return a value as a float if it is a finite number >= 0.

    NumPy's numbers are accepted, True and False are not.

    Parameters
    ----------
    value : object

    Returns
    -------
    float or None
        None for any other value.

    Examples
    --------
    >>> number(3), number(-1), number(10**400), number(True)
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        amount = float(value)
    except OverflowError:
        return None
    return amount if 0.0 <= amount < math.inf else None
