"""Pieces of tensors: those that cover theirs once are taken, and a rank copies what it needs of each."""

from __future__ import annotations

import io
import random
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from distconv.checkpoint.pieces import check_cover, copy_piece
from distconv.distribution import Box, Interval
from distconv.errors import CheckpointError


def entry(shape: list[int], boxes: list[Any]) -> dict[str, Any]:
    return {"shape": shape, "pieces": [{"box": box} for box in boxes]}


@pytest.mark.fault(65)
def test_what_counts_as_covered_is_what_a_count_of_each_element_says() -> None:
    draw = random.Random(0)
    outcomes = []
    for _ in range(400):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
        cut = draw.randint(0, shape[0])
        rest = [[0, extent] for extent in shape[1:]]
        boxes = [[[0, cut], *rest], [[cut, shape[0]], *rest]]
        if draw.random() < 0.7:
            dim = draw.randrange(len(shape))
            boxes[draw.randrange(2)][dim] = sorted(draw.choices(range(shape[dim] + 1), k=2))
        times = np.zeros(shape, dtype=int)
        for box in boxes:
            times[tuple(slice(*each) for each in box)] += 1
        outcomes.append(bool((times == 1).all()))
        if outcomes[-1]:
            check_cover("x", entry(shape, boxes))
            continue
        text = (
            f"the pieces of 'x' cover {(times > 0).sum()} of {times.size} elements, "
            f"{(times > 1).sum()} of them more than once"
        )
        with pytest.raises(CheckpointError, match=text):
            check_cover("x", entry(shape, boxes))
    assert min(outcomes.count(True), outcomes.count(False)) > 50


@pytest.mark.fault(71)
@pytest.mark.parametrize("box", [[[0, 5]], [[-1, 3]], [[3, 1]], [[0, 4], [0, 1]], []])
def test_a_piece_outside_its_tensor_is_refused(box: Any) -> None:
    with pytest.raises(CheckpointError, match=r"a piece of 'x' lies outside its shape \(4,\)"):
        check_cover("x", entry([4], [box]))


@pytest.mark.fault(71)
def test_a_tensor_of_any_size_in_pieces_that_form_no_grid_is_refused_at_once() -> None:
    shape = [2**20] * 3
    boxes = [[[number, number + 1]] * 3 for number in range(1000)]
    with pytest.raises(CheckpointError, match="'x' lies in 1000 blocks that do not form a grid"):
        check_cover("x", entry(shape, boxes))
    check_cover("x", entry(shape, [[[0, 2**20]] * 3]))


def test_scalars_and_empty_tensors_are_covered_by_one_piece() -> None:
    check_cover("x", entry([], [[]]))
    check_cover("x", entry([0, 2], [[[0, 0], [0, 2]]]))
    with pytest.raises(CheckpointError, match="the pieces of 'x' cover 0 of 1 elements"):
        check_cover("x", entry([], []))


def box(*ranges: tuple[int, int]) -> Box:
    return tuple(Interval(*each) for each in ranges)


@pytest.mark.fault(71)
def test_a_rank_copies_what_its_block_has_of_a_piece_and_follows_no_link() -> None:
    whole, image = torch.arange(48.0).reshape(6, 8), io.BytesIO()
    with h5py.File(image, "w") as file:
        file["x"] = whole[2:5, 1:7].numpy()
        file["link"] = h5py.ExternalLink("/etc/passwd", "x")
        file["soft"] = h5py.SoftLink("/x")
        out = torch.zeros(3, 5)
        copy_piece(file, "x", box((2, 5), (1, 7)), out, box((0, 3), (3, 8)))
        assert torch.equal(out, torch.nn.functional.pad(whole[2:3, 3:7], (0, 1, 2, 0)))
        for name in ("link", "soft", "nothing"):
            with pytest.raises(CheckpointError, match=f"there is no dataset '{name}'"):
                copy_piece(file, name, box((2, 5), (1, 7)), out, box((0, 3), (3, 8)))
        with pytest.raises(CheckpointError, match=r"a piece of 'x' is float32 \(3, 6\)"):
            copy_piece(file, "x", box((2, 5), (1, 6)), out, box((0, 3), (3, 8)))


@pytest.mark.fault(71)
@pytest.mark.parametrize("kind", ["double", "complex", "text", "compressed"])
def test_values_of_another_kind_than_was_written_are_refused(kind: str) -> None:
    stored = {"double": [1e300], "complex": [1j], "text": [b"long" * 99], "compressed": [1.0]}[kind]
    out, image = torch.zeros(1), io.BytesIO()
    with h5py.File(image, "w") as file:
        if kind == "compressed":
            file.create_dataset("x", data=np.array(stored, "f4"), chunks=(1,), compression="gzip")
        else:
            file["x"] = np.array(stored)
        with pytest.raises(
            CheckpointError, match="there is no dataset 'x'" if kind == "compressed" else "a piece of 'x' is"
        ):
            copy_piece(file, "x", box((0, 1)), out, box((0, 1)))
