"""A manifest that somebody has made up, with a right checksum, is refused like any that is damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from distconv import checkpoint
from distconv.checkpoint import reading
from distconv.checkpoint.manifest import MANIFEST
from tests.distconv.checkpoint.damage import VALUES, on_rank_0, refused, resigned, tensors

TENSOR = ("tensors", "model/weight")
PIECE = (*TENSOR, "pieces", 0)

FORGERIES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "no format": (("format",), None),
    "true as format": (("format",), True),
    "a negative step": (("step",), -1),
    "a serial number that is none": (("serial",), "last"),
    "damaged ones that are none": (("damaged",), [3]),
    "values that are none": (("values",), []),
    "values of no pairs": (("values", "x"), {"distconv/pairs": 3}),
    "tensors that are none": (("tensors",), "none"),
    "a function as dtype": ((*TENSOR, "dtype"), "torch.save"),
    "a dtype without torch": ((*TENSOR, "dtype"), "float64"),
    "a quantized dtype": ((*TENSOR, "dtype"), "torch.qint8"),
    "a negative extent": ((*TENSOR, "shape"), [-3, 4]),
    "an extent beyond any": ((*TENSOR, "shape"), [3, 2**70]),
    "too many dimensions": ((*TENSOR, "shape"), [1] * 99),
    "a list as file": ((*PIECE, "file"), [1]),
    "a box of numbers": ((*PIECE, "box"), [1, 2]),
    "a box of other dimensions": ((*PIECE, "box"), [[0, 3]]),
    "a box that ends before it begins": ((*PIECE, "box"), [[3, 0], [0, 4]]),
}


def forged(folder: Path, place: tuple[Any, ...], value: object) -> None:
    """Put ``value`` there, or nothing, and a right checksum."""
    manifest = at = json.loads((folder / MANIFEST).read_text())
    for key in place[:-1]:
        at = at[key]
    if value is None:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    resigned(folder, manifest)


@pytest.mark.fault(79)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("what", FORGERIES)
def test_what_no_manifest_is_like_is_one_error_that_may_be_passed_over(
    comm: Any, shared_tmp_path: Path, what: str
) -> None:
    for step in (1, 2):
        folder = checkpoint.save(shared_tmp_path, step, tensors(), VALUES, comm)
    comm.Barrier()
    on_rank_0(comm, lambda: forged(folder, *FORGERIES[what]))
    assert f"checkpoint {folder} is damaged: {MANIFEST}: " in refused(comm, lambda: checkpoint.load(folder, comm))
    found = checkpoint.load_newest(shared_tmp_path, comm, fallback=True)
    assert found is not None
    assert found.step == 1


@pytest.mark.fault(79, 80)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("text", ["[]", "7", '{"a":' * 10**5, '{"format": 1, "format": 1}', "9" * 10**4, "\xff"])
def test_what_is_no_manifest_at_all_is_the_same_error(comm: Any, shared_tmp_path: Path, text: str) -> None:
    folder = checkpoint.save(shared_tmp_path, 1, tensors(), VALUES, comm)
    comm.Barrier()
    on_rank_0(comm, lambda: (folder / MANIFEST).write_bytes(text.encode("latin-1")))
    assert f"checkpoint {folder} is damaged: {MANIFEST}" in refused(comm, lambda: checkpoint.load(folder, comm))


@pytest.mark.fault(80)
@pytest.mark.ranks(1, 2)
def test_a_tensor_that_claims_more_than_its_file_has_is_refused_before_there_is_room_for_it(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint.save(shared_tmp_path, 1, {"x": torch.ones(3)}, {}, comm)
    comm.Barrier()
    monkeypatch.setattr(reading, "read_bytes", None)
    on_rank_0(comm, lambda: forged(folder, ("tensors", "x", "shape"), [2**40]))
    assert "the pieces of 'x' cover 3 of" in refused(comm, lambda: checkpoint.load(folder, comm))
    on_rank_0(comm, lambda: forged(folder, ("tensors", "x", "pieces", 0, "box"), [[0, 2**40]]))
    text = refused(comm, lambda: checkpoint.load(folder, comm))
    assert f"bytes, but its tensors take {2**42}" in text


@pytest.mark.fault(80)
@pytest.mark.ranks(1, 2)
def test_a_file_that_is_larger_than_what_it_holds_is_not_read(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint.save(shared_tmp_path, 1, {"x": torch.ones(3)}, {}, comm)
    comm.Barrier()
    name = next(folder.glob("*.h5")).name
    monkeypatch.setattr(reading, "read_bytes", None)
    on_rank_0(comm, lambda: (os.truncate(folder / name, 2**40), forged(folder, ("files", name, "bytes"), 2**40)))
    assert f"{name} has {2**40} bytes, but its tensors take 12, and" in refused(
        comm, lambda: checkpoint.load(folder, comm)
    )
