"""The mesh-tangling data set: what is there already is kept, refused or gone on with; mirror images of samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from distconv.errors import DataError
from distconv.jobs.mesh.dataset import flip, generate
from tests.jobs.mesh.mesh_files import SIZE

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


def test_a_complete_file_is_left_as_it_is(small: Path) -> None:
    before = small.read_bytes()
    summary = generate(small, size=SIZE, samples=7, heldout=5, seed=3, progress=False)
    assert (summary.samples, summary.heldout) == (7, 5)
    assert small.read_bytes() == before


def test_a_file_with_other_content_is_not_overwritten(small: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mesh\.h5: exists and is not the data set asked for"):
        generate(small, size=SIZE, samples=8, heldout=5, seed=3, progress=False)
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(DataError, match="remove it or choose another name"):
        generate(tmp_path / "notes", size=SIZE, samples=1, progress=False)
    assert (tmp_path / "notes").read_text() == "mine"


def test_parts_of_another_recipe_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.h5.parts").mkdir()
    (tmp_path / "a.h5.parts" / "recipe.json").write_text('{"size": 64}')
    with pytest.raises(DataError, match="holds runs with size = 64 where 32 is asked for"):
        generate(tmp_path / "a.h5", size=SIZE, samples=1, progress=False)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be used"):
        generate(tmp_path / "file" / "mesh.h5", size=SIZE, samples=1, progress=False)


def test_flipping_twice_gives_the_sample_back_and_batches_flip_as_one() -> None:
    rng = np.random.default_rng(0)
    channels, label = rng.normal(size=(3, 18, 5, 7)), rng.integers(0, 2, (3, 5, 7))
    for axis in "hw":
        again = flip(*flip(channels, label, axis), axis)
        np.testing.assert_array_equal(again[0], channels)
        np.testing.assert_array_equal(again[1], label)
        np.testing.assert_array_equal(flip(channels, label, axis)[0][1], flip(channels[1], label[1], axis)[0])
    with pytest.raises(ValueError, match="an image has the axes 'h' and 'w'"):
        flip(channels, label, "d")
