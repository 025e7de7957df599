"""Small text files that others wrote: whatever is wrong with one is a sentence that names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distconv import text_files
from distconv.errors import PlanError
from distconv.text_files import parsed_json, read_text, short


def test_text_is_read_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for mark in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(mark + "n = 2 ångström".encode())
        assert read_text(path, "plan", PlanError) == "n = 2 ångström"


def test_a_file_that_is_no_text_is_named_with_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"abc\xff")
    with pytest.raises(PlanError, match=r"plan .*a\.json cannot be read: byte 3 is no UTF-8 text"):
        read_text(path, "plan", PlanError)


@pytest.mark.parametrize(
    ("name", "reason"), [("none.json", "No such file"), ("", "Is a directory"), ("a\0b", "embedded null")]
)
def test_a_file_that_cannot_be_opened_is_named_with_the_reason(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(PlanError, match=f"cannot be read: {reason}"):
        read_text(f"{tmp_path}/{name}", "plan", PlanError)


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LARGEST_BYTES", 8)
    path = tmp_path / "a.json"
    path.write_text("12345678")
    assert read_text(path, "plan", PlanError) == "12345678"
    path.write_text("123456789")
    with pytest.raises(PlanError, match="more than 8 bytes are too many for a plan"):
        read_text(path, "plan", PlanError)


def test_json_is_what_the_standard_library_reads() -> None:
    text = '{"a": [1, 2.5, null], "b": {"c": "d"}}'
    assert parsed_json(text, "plan x", PlanError) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' is there twice, expected once"),
        ("[" * 100_000, "recursion"),
        ("1" * 5000, "digits"),
    ],
    ids=["cut short", "a key twice", "nested too deeply", "a number without end"],
)
def test_what_is_no_json_is_refused_in_a_sentence(text: str, reason: str) -> None:
    with pytest.raises(PlanError, match=f"plan x cannot be read as JSON: .*{reason}") as caught:
        parsed_json(text, "plan x", PlanError)
    assert len(str(caught.value)) < 300


def test_numbers_that_are_none_may_be_refused() -> None:
    def refuse(text: str) -> float:
        raise ValueError(f"{text} is no time")

    assert parsed_json("[Infinity]", "profile", PlanError) == [float("inf")]
    with pytest.raises(PlanError, match="Infinity is no time"):
        parsed_json("[Infinity]", "profile", PlanError, refuse)


def test_long_texts_are_cut() -> None:
    assert short("x" * 60) == "x" * 60
    assert short("x" * 61) == "x" * 57 + "..."
