"""Strict reading of small JSON and YAML files: plans, machines, layer profiles, options, manifests.

A file passes three steps::

    1  read_text                 limits the size and decodes UTF-8
    2  parse_json, parse_yaml    reject repeated keys, deep nesting, and aliases that expand without limit
    3  decode                    checks types and keys against a schema: a subclass of File, whose fields are the keys

Every error is one line ``<kind of file> <path>: <path of the key>: found <value>, expected <...>``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from distconv.errors import DistconvError
from distconv.whole_files import open_regular

T = TypeVar("T")

LARGEST_BYTES = 10 << 20
"""Limit on the size of a file, far above that of any valid one."""

DEEPEST_NESTING = 32
"""Limit on the levels of a YAML file: at some hundred thousand levels the YAML library ends the process."""

_KINDS = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "null": "null"}
_KINDS |= {"object": "a mapping", "array": "a list"}
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")


class File(msgspec.Struct, forbid_unknown_fields=True):
    """Base class of schemas: a mapping with exactly these keys, of which those with a default are optional."""


def load(
    path: str | os.PathLike[str],
    schema: type[T],
    what: str,
    error: type[DistconvError],
    parse: Callable[[str, str, type[DistconvError]], Any] | None = None,
) -> T:
    """Read a file and check it against a schema.

    Parameters
    ----------
    path : str or path-like
        File of JSON or YAML.
    schema : type
        The expected type, usually a subclass of :class:`File`.
    what : str
        The kind of file, such as ``"plan"``, for messages.
    error : type
        The class of the error to raise.
    parse : callable, optional
        :func:`parse_json` (default) or :func:`parse_yaml`.

    Returns
    -------
    T
        The content, an instance of ``schema``.

    Raises
    ------
    error
        If the file cannot be read or does not fit the schema.
    """
    where = f"{what} {path}"
    return decode((parse or parse_json)(read_text(path, what, error), where, error), schema, where, error)


# -- from a path to text ----------------------------------------------------------------------------------------------


def read_text(path: str | os.PathLike[str], what: str, error: type[DistconvError]) -> str:
    """Return the UTF-8 text of a file of at most ``LARGEST_BYTES`` bytes.

    Parameters
    ----------
    path, what, error
        As in :func:`load`.

    Returns
    -------
    str

    Raises
    ------
    error
        If the file cannot be read, is larger, or is not UTF-8.
    """
    try:
        with open_regular(path) as file:
            # One byte more than is allowed, so that a larger file is noticed without reading all of it.
            content = file.read(LARGEST_BYTES + 1)
    except (OSError, ValueError) as failure:  # ValueError: a path with a null character
        raise error(f"{what} {path} cannot be read: {getattr(failure, 'strerror', None) or failure}") from failure
    if len(content) > LARGEST_BYTES:
        raise error(f"{what} {path}: the file has more than {LARGEST_BYTES} bytes, too many for a {what}")
    try:
        # Without the byte order mark that some editors write.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        raise error(f"{what} {path} cannot be read: byte {failure.start} is not UTF-8 text") from failure


# -- from text to mappings, lists and values --------------------------------------------------------------------------


def parse_json(text: str, where: str, error: type[DistconvError], constant: Callable[[str], object] = float) -> Any:
    """Parse a JSON text.

    Parameters
    ----------
    text : str
        Contents of a file or an argument.
    where : str
        The name of the file, for messages.
    error : type
        The class of the error to raise.
    constant : callable
        Converts the strings NaN, Infinity and -Infinity, or rejects them with a ValueError.

    Returns
    -------
    object
        Mappings, lists and values.

    Raises
    ------
    error
        If the text is not JSON, repeats a key, or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_reject_repeated_keys, parse_constant=constant)
    except (ValueError, RecursionError) as failure:  # ValueError also for a number of thousands of digits
        raise error(f"{where} cannot be read as JSON: {failure}") from failure


def parse_yaml(text: str, where: str, error: type[DistconvError]) -> Any:
    """Parse a YAML text whose keys are all strings.

    Parameters
    ----------
    text, where, error
        As in :func:`parse_json`.

    Returns
    -------
    object
        Mappings, lists and values.

    Raises
    ------
    error
        If the text is not YAML, repeats a key, or is nested more than ``DEEPEST_NESTING`` levels deep.
    """
    import yaml  # here: importing distconv does not need it

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        # From the events, before the parser builds nodes, which it does recursively.
        _check_depth(type(event).__name__ for event in yaml.parse(text, Loader=loader))
        reading = loader(text)
        root = reading.get_single_node()
        _check_keys(root)
        return reading.construct_document(root) if root else None
    except (ValueError, RecursionError, yaml.YAMLError) as failure:
        raise error(f"{where} cannot be read as YAML: {' '.join(str(failure).split())}") from failure


def _check_depth(events: Iterable[str]) -> None:
    depth = 0
    for event in events:
        depth += event.endswith("StartEvent") - event.endswith("EndEvent")
        if depth > DEEPEST_NESTING + 2:  # the stream and the document are levels, too
            raise ValueError(f"found more than {DEEPEST_NESTING} levels, expected a few")


def _check_keys(root: Any) -> None:
    """Check that keys are unique strings.

    YAML silently keeps the last of repeated keys, and merges (``<<``) can expand without limit.
    """
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        # An alias is the same node again, perhaps inside itself.
        if node is None or node.id == "scalar" or id(node) in seen:
            continue
        seen.add(id(node))
        if node.id == "sequence":
            waiting += node.value
            continue
        keys = set()
        for key, value in node.value:
            line, kind = key.start_mark.line + 1, key.tag.rpartition(":")[2]
            if kind != "str":
                raise ValueError(f"line {line}: found a key of type {kind}, expected a string; put it in quotes")
            if key.value in keys:
                raise ValueError(f"line {line}: key {shorten(repr(key.value))} occurs twice, expected once")
            keys.add(key.value)
            waiting.append(value)


def _reject_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise ValueError(f"key {shorten(repr(key))} occurs twice, expected once")
        members[key] = value
    return members


# -- from mappings to a schema ----------------------------------------------------------------------------------------


def decode(content: object, schema: type[T], where: str, error: type[DistconvError]) -> T:
    """Check parsed content against a schema.

    Messages describe an expected value by the ``description`` of its ``msgspec.Meta``, otherwise by its type. A type
    that msgspec does not support has a class method ``decode``, whose ValueError describes what is expected.

    Parameters
    ----------
    content : object
        Mappings, lists and values.
    schema : type
        The expected type.
    where : str
        The name of the file, for messages.
    error : type
        The class of the error to raise.

    Returns
    -------
    T
        An instance of ``schema``.

    Raises
    ------
    error
        If a value has another type, or a key is missing or unknown.
    """
    try:
        return msgspec.convert(content, schema, dec_hook=_decode)
    except msgspec.ValidationError as failure:
        raise error(f"{where}{': ' if where else ''}{_explain(str(failure), content, schema)}") from None


def _decode(kind: Any, value: object) -> object:
    return kind.decode(value)


def _explain(failure: str, content: Any, kind: Any) -> str:
    """Return msgspec's message with the path of the key, the value that was found, and the allowed keys or values."""
    message, _, path = failure.replace("Number out of range", "Expected `float`").partition(" - at `$")
    place = ""
    with contextlib.suppress(LookupError, TypeError):  # an unknown key may look like a path
        for key, index in _STEP.findall(path):
            # Follow the path through schema and content at the same time.
            kind = _bare(kind)
            if key:
                kind = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}[key]
            else:
                kind = [each for each in get_args(kind) if each is not ...][-1]
            if index == "...":
                key = next(name for name, value in content.items() if not _is_valid(value, kind))
            content = content[int(index) if index.isdigit() else key]
            place += f"[{index}]" if index.isdigit() else f".{describe_value(key, quoted=False)}"
    meant = [each.description for each in getattr(kind, "__metadata__", ()) if each.description]
    kind, found = _bare(kind), describe_value(content)
    if named := re.fullmatch("Object (missing|contains un).*? `(.+)`", message, re.DOTALL):
        place += f".{describe_value(named[2], quoted=False)}"
        found = "nothing" if named[1] == "missing" else "an unknown key"
    if meant:
        expected = meant[0]
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        required, optional = ([f.encode_name for f in fields if f.required is each] for each in (True, False))
        expected = f"a mapping with the keys {', '.join(required)}"
        expected += f" (and perhaps {', '.join(optional)})" if optional else ""
    elif get_origin(kind) is Literal:
        expected = " or ".join(map(repr, get_args(kind)))
    else:
        words = re.sub(r"`(.+?)`", lambda names: " or ".join(_KINDS.get(n, n) for n in names[1].split(" | ")), message)
        expected = words.partition(", got ")[0].removeprefix("Expected ")
    return f"{place.lstrip('.')}{': ' if place else ''}found {found}, expected {expected}"


def _bare(kind: Any) -> Any:
    """Return the type ``kind`` without constraints and without None as an alternative."""
    while get_origin(kind) is Annotated or type(None) in get_args(kind):
        kind = next(each for each in get_args(kind) if each is not type(None))
    return kind


def _is_valid(content: object, kind: Any) -> bool:
    try:
        msgspec.convert(content, kind, dec_hook=_decode)
    except msgspec.ValidationError:
        return False
    return True


# -- messages ---------------------------------------------------------------------------------------------------------


def describe_value(value: object, quoted: bool = True) -> str:
    """Return a short description of a value, which may be of any size.

    Parameters
    ----------
    value : object
        Value that a parser returned.
    quoted : bool
        Show strings with quotes. Otherwise without.

    Returns
    -------
    str
    """
    if value is None:
        return "nothing"
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return shorten(repr(value) if quoted else " ".join(str(value).split()))


def shorten(text: str, most: int = 60) -> str:
    """Return ``text``, or its beginning and three dots if it has more than ``most`` characters.

    Parameters
    ----------
    text : str
        Text of any length.
    most : int
        Largest number of characters.

    Returns
    -------
    str
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."
