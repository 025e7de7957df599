"""Strict reading of YAML files in which quantities carry their units, such as ``latency: 1.5 us``.

An error says where (the full path of the key), what was found, and what is expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from numbers import Real
from pathlib import Path

import yaml

from distconv.errors import MachineError
from distconv.text_files import read_text, short

DEEPEST_NESTING = 32
"""Far deeper than any file of ours; at some hundred thousand levels the YAML library ends the process."""

_DECIMAL = {"": "1", "k": "1e3", "M": "1e6", "G": "1e9", "T": "1e12"}
_BYTES = {f"{prefix}B": size for prefix, size in _DECIMAL.items()} | {
    "KiB": str(1 << 10),
    "MiB": str(1 << 20),
    "GiB": str(1 << 30),
}
UNITS = {
    "a time such as '1.5 us'": {"s": "1", "ms": "1e-3", "us": "1e-6", "ns": "1e-9"},
    "a memory size such as '16 GB'": _BYTES,
    "a bandwidth such as '12.5 GB/s'": {f"{unit}/s": size for unit, size in _BYTES.items()},
    "a rate such as '15.7 TFLOP/s'": {f"{prefix}FLOP/s": size for prefix, size in _DECIMAL.items()},
    "a number such as '160000 elements'": {"elements": "1"},
}
"""By what is measured: its units, and how many base units each is (exact decimals)."""

TIME, MEMORY, BANDWIDTH, RATE, ELEMENTS = UNITS

_QUANTITY = re.compile(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]+)\s*")
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def parsed(text: str, kind: str) -> float | None:
    """The quantity in base units, None if ``text`` is not a positive one of this kind.

    >>> parsed("1.5 us", TIME), parsed("2 GiB", MEMORY), parsed("16 GHz", BANDWIDTH)
    (1.5e-06, 2147483648.0, None)
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in UNITS[kind]:
        return None
    # A float has less range than a Decimal, so whatever is finite here is so below.
    if not 0.0 < float(match[1]) < math.inf:
        return None
    value = float(Decimal(match[1]) * Decimal(UNITS[kind][match[2]]))
    return value if 0.0 < value < math.inf else None


def number(value: object) -> float | None:
    """``value`` as a float, None if it is no finite number >= 0; NumPy's numbers are numbers, True and False are not.

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


def written(value: float, kind: str) -> str:
    """``value`` (in base units) in the largest decimal unit that it reaches; :func:`parsed` gives back the same float.

    Raises
    ------
    MachineError
        If the value is not positive and finite.

    >>> written(1.5e-06, TIME), written(12.5e9, BANDWIDTH)
    ('1.5 us', '12.5 GB/s')
    """
    if not 0.0 < value < math.inf:
        raise MachineError(f"machine: {value} is no quantity to write: it must be positive and finite")
    exact = Decimal(repr(float(value)))
    sizes = {unit: Decimal(size) for unit, size in UNITS[kind].items() if not unit.startswith(("Ki", "Mi", "Gi"))}
    reached = [unit for unit, size in sizes.items() if size <= exact] or [min(sizes, key=lambda unit: sizes[unit])]
    unit = max(reached, key=lambda unit: sizes[unit])
    return f"{(exact / sizes[unit]).normalize():f} {unit}"


class Section:
    """One mapping of a file: has exactly the keys that are ``required`` and some that are ``optional``.

    Raises
    ------
    MachineError
        If it is no mapping, lacks a key or has another one; the methods, if a value is not what they return.
    """

    def __init__(
        self, content: object, source: str, path: str, required: Sequence[str], optional: Sequence[str] = ()
    ) -> None:
        self.source, self.path = source, path
        expected = f"a mapping with the keys {', '.join(required)}"
        expected += f" (and perhaps {', '.join(optional)})" if optional else ""
        if not isinstance(content, dict):
            raise self._error(path, shown(content), expected)
        self.content = content
        unknown = [key for key in content if key not in (*required, *optional)]
        if unknown:
            raise self._error(self._below(shown(unknown[0], quoted=False)), "an unknown key", expected)
        missing = [key for key in required if key not in content]
        if missing:
            raise self._error(self._below(missing[0]), "nothing", expected)

    def quantity(self, key: str, kind: str) -> float:
        """A positive quantity, in base units."""
        value = self.content[key]
        amount = parsed(value, kind) if isinstance(value, str) else None
        if amount is None:
            raise self.wrong(key, f"{kind} (units: {', '.join(UNITS[kind])})")
        return amount

    def count(self, key: str) -> int:
        """A positive whole number."""
        value = self.content[key]
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.wrong(key, "a positive whole number")
        return value

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.content[key]
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str) -> str:
        """Text that is not empty."""
        value = self.content[key]
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(key, "text")
        return value

    def seconds(self, key: str) -> dict[str, float]:
        """A mapping from any text to a time in seconds, which carries no unit."""
        table = self.content[key]
        if not isinstance(table, dict):
            raise self.wrong(key, "a mapping from text to seconds")
        for name, value in table.items():
            if not isinstance(name, str):
                raise self._error(self._below(key, shown(name, quoted=False)), shown(name), "text as its key")
            if not number(value):
                raise self._error(
                    self._below(key, shown(name, quoted=False)),
                    shown(value),
                    "a positive number of seconds such as 0.0032",
                )
        return {name: float(value) for name, value in table.items()}

    def section(self, key: str, required: Sequence[str], optional: Sequence[str] = ()) -> Section:
        """The mapping under ``key``."""
        return Section(self.content[key], self.source, self._below(key), required, optional)

    def sections(self, key: str, required: Sequence[str], optional: Sequence[str] = ()) -> list[Section]:
        """The mappings of the list under ``key``, which is not empty."""
        entries = self.content[key]
        if not isinstance(entries, list) or not entries:
            raise self.wrong(key, "a list of mappings")
        path = self._below(key)
        return [Section(item, self.source, f"{path}[{i}]", required, optional) for i, item in enumerate(entries)]

    def named_sections(self, key: str, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Section]:
        """The mappings under ``key`` by their names, which are any text."""
        sections = self.content[key]
        if not isinstance(sections, dict) or not sections or not all(isinstance(name, str) for name in sections):
            raise self.wrong(key, "a mapping from names to mappings")
        path = self._below(key)
        return {
            name: Section(item, self.source, f"{path}.{shown(name, quoted=False)}", required, optional)
            for name, item in sections.items()
        }

    def wrong(self, key: str, expected: str) -> MachineError:
        """The error that ``key`` has another value than ``expected``."""
        return self._error(self._below(key), shown(self.content[key]), expected)

    def _below(self, *keys: str) -> str:
        return ".".join([*([self.path] if self.path else []), *keys])

    def _error(self, path: str, actual: str, expected: str) -> MachineError:
        return MachineError(f"machine {self.source}: {f'{path}: ' if path else ''}found {actual}, expected {expected}")


def shown(value: object, quoted: bool = True) -> str:
    """``value`` in a few words: a file may hold anything of any size."""
    if value is None:
        return "nothing"
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return short(repr(value) if quoted else " ".join(str(value).split()))


def read(path: Path) -> object:
    """What the YAML file holds.

    Raises
    ------
    MachineError
        If it cannot be read, is no YAML, is too large or nested too deeply, or has a key twice.
    """
    text = read_text(path, "machine", MachineError)
    try:
        return _loaded(text, path)
    except MachineError:
        raise
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise MachineError(f"machine {path} cannot be read as YAML: {reason}") from error


def _loaded(text: str, path: Path) -> object:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST_NESTING:
            raise MachineError(f"machine {path}: found more than {DEEPEST_NESTING} levels, expected a few")
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check_twins(root, path)
        content: object = loader.construct_document(root)
        return content
    finally:
        loader.dispose()


def _check_twins(root: yaml.Node, source: Path) -> None:
    """Raise if a mapping has a key twice, of which YAML keeps the last one without a word."""
    waiting, visited = [(root, "")], set()
    while waiting:
        node, path = waiting.pop()
        # An alias is the same node again, perhaps inside of itself.
        if id(node) in visited or isinstance(node, yaml.ScalarNode):
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += [(item, f"{path}[{i}]") for i, item in enumerate(node.value)]
            continue
        keys = set()
        for key, value in node.value:
            below = f"{path}.{key.value}" if path else str(key.value)
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise MachineError(f"machine {source}: {below}: found twice, expected once")
            keys.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
            waiting.append((value, below))


def dumped(content: dict[str, object]) -> str:
    """``content`` as YAML, its keys in the order in which they are."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)
    return text
