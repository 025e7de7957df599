"""Files that other people wrote: every mistake in one is a single line that names the file and the place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
import yaml

from distconv import text_files
from distconv.errors import PlanError
from distconv.text_files import File, decode, load, parse_json, parse_yaml, read_text, shorten


class Color(str):
    """A type of its own."""

    @classmethod
    def decode(cls, value: object) -> Color:
        if value not in ("red", "blue"):
            raise ValueError("red or blue")
        return cls(value)


class Item(File):
    count: Annotated[int, msgspec.Meta(ge=1, description="a positive whole number")]
    weight: float = 1.0


class Content(File):
    format: Literal["x", "y"]
    items: dict[str, Item]
    table: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    pairs: list[tuple[str, str]] = msgspec.field(default_factory=list)
    color: Color | None = None
    flag: bool = False


GOOD: dict[str, Any] = {"format": "x", "items": {"a": {"count": 2}, "b.c": {"count": 3, "weight": 2}}}


# -- from a path to text ----------------------------------------------------------------------------------------------


def test_text_is_read_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for mark in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(mark + "n = 2 ångström".encode())
        assert read_text(path, "plan", PlanError) == "n = 2 ångström"


@pytest.mark.parametrize("content", [b"abc\xff", b"abc\xe9", "abc".encode("utf-16")])
def test_a_file_that_is_not_utf8_is_named_with_the_byte(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"plan .*a\.json cannot be read: byte [03] is not UTF-8 text"):
        read_text(path, "plan", PlanError)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none.json", "No such file"),
        ("", ".*not a regular file"),
        ("pipe", ".*not a regular file"),
        ("a\0b", "embedded null"),
    ],
)
def test_a_file_that_cannot_be_opened_is_named_with_the_reason(tmp_path: Path, name: str, reason: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PlanError, match=f"cannot be read: {reason}"):
        read_text(f"{tmp_path}/{name}", "plan", PlanError)


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LARGEST_BYTES", 8)
    path = tmp_path / "a.json"
    path.write_text("12345678")
    assert read_text(path, "plan", PlanError) == "12345678"
    path.write_text("123456789")
    with pytest.raises(PlanError, match="the file has more than 8 bytes, too many for a plan"):
        read_text(path, "plan", PlanError)


# -- from text to values ----------------------------------------------------------------------------------------------


def test_json_is_what_the_standard_library_reads() -> None:
    text = '{"a": [1, 2.5, null], "b": {"c": "d"}}'
    assert parse_json(text, "plan x", PlanError) == json.loads(text)


def test_yaml_is_what_the_safe_loader_reads() -> None:
    text = "a: [1, 2.5, ~, &same {b: yes}]\nc: *same\nd: 2020-01-01\n"
    assert parse_yaml(text, "plan x", PlanError) == yaml.safe_load(text)
    assert parse_yaml("# nothing", "plan x", PlanError) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' occurs twice, expected once"),
        ("[" * 100_000, "recursion"),
        ("1" * 5000, "digits"),
        ("", "Expecting value"),
    ],
    ids=["cut short", "a key twice", "nested too deeply", "a number without end", "empty"],
)
def test_what_is_no_json_is_one_line(text: str, reason: str) -> None:
    with pytest.raises(PlanError, match=f"plan x cannot be read as JSON: .*{reason}") as caught:
        parse_json(text, "plan x", PlanError)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "line 2, column 1"),
        ("a: 1\nb: 2\na: 3", "line 3: key 'a' occurs twice, expected once"),
        ("a: {b: 1, b: 1}", "line 1: key 'b' occurs twice, expected once"),
        ("a: 1\n7: 2", "line 2: found a key of type int, expected a string; put it in quotes"),
        ("no: 1", "found a key of type bool"),
        ("? [1, 2]\n: 3", "found a key of type seq"),
        ("a: &a {b: 1}\nc: {<<: *a}", "line 2: found a key of type merge"),
        ("[" * 9_000_000, "more than 32 levels"),
        ("- " * 1_000_000, "more than 32 levels"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: 2001-99-99", "month must be in"),
        ("a: b\n---\nc: d", "a single document"),
        ("a: " + "9" * 5000, "digits"),
        ("a: \x07", "control characters"),
    ],
    ids=lambda text: repr(text[:12]),
)
def test_what_is_no_yaml_is_one_line(text: str, reason: str) -> None:
    with pytest.raises(PlanError, match=f"plan x cannot be read as YAML: .*{reason}") as caught:
        parse_yaml(text, "plan x", PlanError)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "text",
    [
        "format: &a [*a]",
        "&a {format: *a}",
        "\n".join(["a: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 60)]),
    ],
    ids=["in itself", "the document in itself", "unfolds without end"],
)
def test_aliases_that_unfold_without_end_are_values_of_a_wrong_type(text: str) -> None:
    with pytest.raises(PlanError, match=r"plan x: .*found"):
        decode(parse_yaml(text, "plan x", PlanError), Content, "plan x", PlanError)


def test_constants_that_json_lacks_may_be_rejected() -> None:
    def reject(text: str) -> float:
        raise ValueError(f"{text} is no time")

    assert parse_json("[Infinity]", "profile", PlanError) == [float("inf")]
    with pytest.raises(PlanError, match="Infinity is no time"):
        parse_json("[Infinity]", "profile", PlanError, reject)


# -- from values to a schema ------------------------------------------------------------------------------------------


def test_a_file_is_read_as_its_schema(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(json.dumps({**GOOD, "pairs": [["a", "b"]], "color": "red"}))
    expected = Content("x", {"a": Item(2), "b.c": Item(3, 2.0)}, pairs=[("a", "b")], color=Color("red"))
    assert load(tmp_path / "a", Content, "plan", PlanError) == expected
    assert load(tmp_path / "a", Content, "plan", PlanError, parse_yaml) == expected


KEYS = "expected a mapping with the keys format, items .and perhaps table, pairs, color, flag"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"more": 1}, f"more: found an unknown key, {KEYS}"),
        ({"x" * 999: 1}, r"xxx+\.\.\.: found an unknown key"),
        ({"a\nb": 1}, "a b: found an unknown key"),
        ({"a - at `$.color[3]": 1}, "found a mapping, expected"),
        ({"format": ...}, f"format: found nothing, {KEYS}"),
        ({"format": "z"}, "format: found 'z', expected 'x' or 'y'"),
        ({"format": None}, "format: found nothing, expected 'x' or 'y'"),
        ({"items": []}, "items: found a list, expected a mapping"),
        ({"items": {"a": {"count": 1}, "b.c": 3}}, r"items\.b\.c: found 3, expected a mapping with the keys count"),
        (
            {"items": {"a": {"cuont": 1}}},
            r"items\.a\.cuont: found an unknown key, expected a mapping with the keys count",
        ),
        ({"items": {"a": {"count": 0}}}, r"items\.a\.count: found 0, expected a positive whole number"),
        ({"items": {"a": {"count": 2.0}}}, r"items\.a\.count: found 2\.0, expected a positive whole number"),
        ({"items": {"a": {"count": True}}}, r"items\.a\.count: found True, expected a positive whole number"),
        ({"items": {"a": {"count": 1, "weight": "1"}}}, r"items\.a\.weight: found '1', expected a number"),
        ({"items": {"a": {"count": 1, "weight": 10**400}}}, r"items\.a\.weight: found 10+\.\.\., expected a number"),
        ({"table": {"a": {"b": 1}, "c": {"d": 2, "e": "3"}}}, r"table\.c\.e: found '3', expected an integer"),
        ({"pairs": [["a", "b"], ["c"]]}, r"pairs\[1\]: found a list, expected a list of length 2"),
        ({"pairs": [["a", 3]]}, r"pairs\[0\]\[1\]: found 3, expected a string"),
        ({"color": "green"}, "color: found 'green', expected red or blue"),
        ({"flag": "yes"}, "flag: found 'yes', expected true or false"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_value_is_named_with_its_key_and_with_what_is_expected(changes: dict[str, Any], reason: str) -> None:
    content = {key: value for key, value in {**GOOD, **changes}.items() if value is not ...}
    with pytest.raises(PlanError, match=f"^plan x: {reason}") as caught:
        decode(content, Content, "plan x", PlanError)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("content", [None, [GOOD], 7, "x"])
def test_content_that_is_no_mapping_is_told_the_keys(content: object) -> None:
    with pytest.raises(PlanError, match=f"^plan x: found .*, {KEYS}"):
        decode(content, Content, "plan x", PlanError)


def test_long_texts_are_cut() -> None:
    assert shorten("x" * 60) == "x" * 60
    assert shorten("x" * 61) == "x" * 57 + "..."
