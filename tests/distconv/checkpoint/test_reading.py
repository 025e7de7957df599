"""Damaged, incomplete and uncovered tensors raise errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distconv import checkpoint
from distconv.checkpoint import reading
from distconv.checkpoint.manifest import MANIFEST
from distconv.errors import CheckpointError
from tests.distconv.checkpoint.damage import VALUES, on_rank_0, only_file, refused, rewritten, tensors

pytestmark = pytest.mark.ranks(1, 2, 4)


@pytest.mark.fault(61, 62)
@pytest.mark.parametrize("target", ["state", "manifest"])
def test_every_flipped_bit_and_every_cut_is_found(comm: Any, shared_tmp_path: Path, target: str) -> None:
    folder = checkpoint.save(shared_tmp_path, 3, tensors(), VALUES, comm)
    path = only_file(folder) if target == "state" else folder / MANIFEST
    content = path.read_bytes()
    comm.Barrier()
    for place in range(0, len(content), max(1, len(content) // 20)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        for damaged in (bytes(flipped), content[:place]):
            on_rank_0(comm, lambda damaged=damaged: path.write_bytes(damaged))
            text = refused(comm, lambda: checkpoint.load(folder, comm))
            assert "is damaged" in text
            assert str(folder) in text
    on_rank_0(comm, lambda: path.write_bytes(content))
    assert checkpoint.load(folder, comm).step == 3


@pytest.mark.fault(63)
def test_files_of_another_step_and_missing_files_are_found(comm: Any, shared_tmp_path: Path) -> None:
    first = checkpoint.save(shared_tmp_path, 1, tensors(), VALUES, comm)
    second = checkpoint.save(shared_tmp_path, 2, {"x": torch.ones(3)}, {}, comm)
    manifest = (first / MANIFEST).read_bytes()
    comm.Barrier()
    on_rank_0(comm, lambda: (second / MANIFEST).write_bytes(manifest))
    assert "holds step 1. Its files were copied from another checkpoint." in refused(
        comm, lambda: checkpoint.load(second, comm)
    )
    on_rank_0(comm, lambda: only_file(first).unlink())
    assert "is incomplete: [Errno 2]" in refused(comm, lambda: checkpoint.load(first, comm))


class Clock:
    """Time that passes where somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.ranks(2, 4)
def test_other_ranks_wait_for_files_that_rank_0_sees_already(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint.save(shared_tmp_path, 1, tensors(), VALUES, comm)
    opened, tries = reading.open_file, []

    def late(*arguments: Any) -> Any:
        tries.append(comm.rank)
        if len(tries) <= (3 if comm.rank == comm.size - 1 else 0):
            raise CheckpointError("is not here yet")
        return opened(*arguments)

    monkeypatch.setattr(reading, "open_file", late)
    found = checkpoint.load(folder, comm)
    assert len(tries) == (4 if comm.rank == comm.size - 1 else 1)
    assert torch.equal(found.tensors["model/weight"], tensors()["model/weight"])

    # Not for ever, and rank 0, which said that they are there, not at all.
    def never(*arguments: Any) -> Any:
        tries.append(comm.rank)
        raise CheckpointError(f"is not there for rank {comm.rank}")

    tries.clear()
    monkeypatch.setattr(reading, "LAG_S", 0.35)
    monkeypatch.setattr(reading, "time", Clock())
    monkeypatch.setattr(reading, "open_file", never)
    text = refused(comm, lambda: checkpoint.load(folder, comm))
    assert f"is not there for rank {comm.size - 1}" in text
    assert len(tries) == (1 if comm.rank == 0 else 5)  # at 0, 0.1, ..., 0.4 s


NOWHERE = "state-000000000000.h5"
COVERS = {
    "too few": (3, 4, ["", [[0, 3]]], "the pieces of 'x' cover 3 of 4 elements, 0 of them more than once"),
    "in no file": (4, 4, [NOWHERE, [[0, 4]]], "a piece of 'x' is in none of its files"),
    "overlap": (
        2,
        4,
        ["", [[0, 2]], "", [[0, 2]]],
        "pieces of 'x' cover 2 of 4 elements, 2 of them more than once",
    ),
}
"""Elements that are saved, elements that the manifest claims, files and boxes of the pieces, and the error."""


@pytest.mark.fault(65)
@pytest.mark.parametrize("kind", COVERS)
def test_pieces_must_cover_their_tensor_once(comm: Any, shared_tmp_path: Path, kind: str) -> None:
    saved, claimed, places, reason = COVERS[kind]
    folder = checkpoint.save(shared_tmp_path, 1, {"x": torch.ones(saved)}, {}, comm)
    name = only_file(folder).name
    pieces = [{"file": file or name, "box": box} for file, box in zip(places[::2], places[1::2], strict=True)]
    comm.Barrier()
    entry = {"dtype": "torch.float32", "shape": [claimed], "pieces": pieces}
    on_rank_0(comm, lambda: rewritten(folder, tensors={"x": entry}))
    assert reason in refused(comm, lambda: checkpoint.load(folder, comm))
