"""NIfTI volumes: boxes of nibabel's values on any number of ranks, their space, and files that are no volumes."""

from __future__ import annotations

import builtins
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distconv as dc
from distconv.data import Field, Loader, moments, open_source
from distconv.data.formats.nifti import NiftiFile
from distconv.errors import DataError
from tests.distconv.layouts import grid_over, raises_everywhere

nibabel = pytest.importorskip("nibabel")
pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.filterwarnings("ignore:.*a chunk of:UserWarning")]

SHAPE = (7, 9, 5)
AFFINE = np.array([[0, -2, 0.5, 10], [1.5, 0, 0, -20], [0, 0.25, 3, 5], [0, 0, 0, 1]])
GRIDS = {1: {"n": 1}, 2: {"h": 2}, 3: {"d": 3}}


def volume(seed: int, *channels: int, dtype: Any = np.int16, scaled: bool = True, kind: Any = None) -> Any:
    values = np.random.default_rng(seed).integers(-900, 900, (*SHAPE, *channels)).astype(dtype)
    image = (kind or nibabel.Nifti1Image)(values, AFFINE + seed * np.eye(4)[:, [3, 0, 1, 2]] * 0.5)
    image.header.set_xyzt_units("mm", "sec")
    if scaled:
        image.header.set_slope_inter(0.37, -1.25)
    return image


def saved(comm: Any, folder: Path, *images: Any, suffix: str = "nii.gz") -> list[Path]:
    paths = [folder / f"case{number}.{suffix}" for number in range(len(images))]
    if comm.rank == 0:
        for path, image in zip(paths, images, strict=True):
            nibabel.save(image, path)
    comm.Barrier()
    return paths


def channels_first(path: Path) -> np.ndarray:
    values = nibabel.load(path).get_fdata()
    return np.moveaxis(values.reshape(*values.shape[:3], -1), -1, 0)


@pytest.mark.parametrize("suffix", ["nii", "nii.gz"])
@pytest.mark.parametrize("channels", [(), (4,), (1, 3)], ids=str)
def test_batches_are_nibabels_values(comm: Any, shared_tmp_path: Path, suffix: str, channels: tuple[int, ...]) -> None:
    paths = saved(comm, shared_tmp_path, *(volume(seed, *channels) for seed in range(3)), suffix=suffix)
    expected = np.stack([channels_first(path) for path in paths])
    for named in (paths, f"{shared_tmp_path}/case*.{suffix}", shared_tmp_path):
        with open_source(named, ["image"], comm) as source:
            assert source.shape("image") == (3, *expected.shape[1:])
            loader = Loader(
                source, [Field("image", "ncdhw", torch.float64)], grid_over(comm, **GRIDS[comm.size]), 2, shuffle=False
            )
            found = torch.cat([dc.gather(batch.tensors[0]) for batch in loader.epoch(0)]).numpy()
        assert np.array_equal(found, expected)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("suffix", ["nii", "nii.gz"])
def test_any_box_is_that_of_the_full_volume(comm: Any, tmp_path: Path, suffix: str) -> None:
    (path,) = saved(comm, tmp_path, volume(0, 4), suffix=suffix)
    expected, store, rng = channels_first(path)[None], NiftiFile(path, ["image"]), np.random.default_rng(1)
    for _ in range(20):
        bounds = [sorted(rng.integers(0, extent + 1, 2)) for extent in expected.shape[1:]]
        box = (slice(0, 1), *(slice(int(low), int(high)) for low, high in bounds))
        assert np.array_equal(store.read("image", box), expected[box])


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("dtype", "scaled", "found"), [
    ("int16", True, "float64"), ("int16", False, "int16"), ("uint8", False, "uint8"), ("float32", False, "float32"),
    (">i2", False, "int16"), (">f4", False, "float32"),
])  # fmt: skip
def test_the_dtype_is_that_of_scaled_values(comm: Any, tmp_path: Path, dtype: str, scaled: bool, found: str) -> None:
    image = volume(0, dtype=dtype, scaled=scaled)
    if dtype.startswith(">"):
        image = nibabel.Nifti1Image(np.asarray(image.dataobj), AFFINE, image.header.as_byteswapped(">"))
    (path,) = saved(comm, tmp_path, image)
    source = open_source(path, "image", comm)
    values = source.read("image", tuple(dc.Interval(0, extent) for extent in source.shape("image")))
    assert source.dtype("image") == values.dtype == np.dtype(found)
    assert np.array_equal(values[0], channels_first(path))


@pytest.mark.ranks(1)
def test_volumes_of_nifti_2_and_images_of_two_dimensions_are_read(comm: Any, tmp_path: Path) -> None:
    flat = nibabel.Nifti1Image(np.arange(12, dtype=np.float32).reshape(3, 4), AFFINE)
    paths = saved(comm, tmp_path, volume(1, kind=nibabel.Nifti2Image), flat)
    for path, shape in zip(paths, [(1, 1, *SHAPE), (1, 1, 3, 4, 1)], strict=True):
        source = open_source(path, ["image"], comm)
        assert source.shape("image") == shape
        assert np.array_equal(source.read("image", tuple(dc.Interval(0, e) for e in shape)).ravel(),
                              channels_first(path).ravel())  # fmt: skip


@pytest.mark.ranks(2)
def test_reading_processes_and_statistics_see_the_same(comm: Any, shared_tmp_path: Path) -> None:
    paths = saved(comm, shared_tmp_path, *(volume(seed, 2) for seed in range(3)))
    expected = np.stack([channels_first(path) for path in paths])
    with open_source(paths, ["image"], comm, readers=2) as source:
        found = moments(source, "image")
        assert list(source.files) == paths and source.labels("image").dims == ("sample", "channel", "x", "y", "z")
        matrices = np.reshape(source.labels("image").attributes["affine"], (3, 4, 4))
    assert np.array_equal(matrices, [nibabel.load(path).affine for path in paths])
    assert found.mean == pytest.approx(expected.mean((0, 2, 3, 4)), rel=1e-12)


@pytest.mark.ranks(1)
def test_the_space_of_a_volume_is_that_of_nibabel(comm: Any, tmp_path: Path) -> None:
    image = volume(2)
    image.set_sform(None, 0)
    image.set_qform(np.diag([2.0, 3.0, 4.0, 1.0]), 1)
    (path,) = saved(comm, tmp_path, image)
    found = open_source(path, ["image"], comm).labels("image").attributes
    assert np.array_equal(np.reshape(found["affine"], (4, 4)), nibabel.load(path).affine)
    assert found["affine_code"] == 1 and found["space_units"] == "mm"


def broken(path: Path) -> list[tuple[str, bytes, str]]:
    content = gzip.compress(path.read_bytes())
    return [
        ("cut.nii", path.read_bytes()[:500], "is incomplete: it has 500 bytes, and a volume of"),
        ("header.nii", path.read_bytes()[:100], "cannot be opened as a NIfTI volume"),
        ("cut.nii.gz", content[:60], "cannot be opened as a NIfTI volume"),
        ("text.nii.gz", b"no volume" * 99, "cannot be opened as a NIfTI volume"),
        ("large.nii.gz", gzip.compress(path.read_bytes()[:40] + bytes([3, 0, 255, 127, 255, 127, 255, 127])
                                       + path.read_bytes()[48:]), "is incomplete: it has"),
    ]  # fmt: skip


@pytest.mark.parametrize("case", range(5))
def test_a_damaged_file_is_one_error_on_all_ranks(comm: Any, shared_tmp_path: Path, case: int) -> None:
    (good,) = saved(comm, shared_tmp_path, volume(0), suffix="nii")
    name, content, text = broken(good)[case]
    comm.Barrier()
    if comm.rank == 0:
        (shared_tmp_path / name).write_bytes(content)
    comm.Barrier()
    for path in (shared_tmp_path / name, [good, shared_tmp_path / name]):
        raises_everywhere(comm, DataError, rf"{name}.*{text}", lambda path=path: open_source(path, ["image"], comm))


def test_values_that_cannot_be_decompressed_are_one_error_in_their_step(comm: Any, shared_tmp_path: Path) -> None:
    """The begin of the file is intact, so that it opens."""
    noise = np.random.default_rng(0).integers(-30000, 30000, (40, 40, 40)).astype(np.int16)
    good, bad = saved(comm, shared_tmp_path, *(nibabel.Nifti1Image(noise, AFFINE) for _ in range(2)))
    if comm.rank == 0:
        bad.write_bytes(bad.read_bytes()[:100_000])
    comm.Barrier()
    with open_source([good, bad], ["image"], comm) as source:
        loader = Loader(source, [Field("image", "ncdhw")], grid_over(comm, **{"w": comm.size}), 1, shuffle=False)
        batches = loader.epoch(0)
        next(batches)
        raises_everywhere(comm, DataError, "case1.nii.gz: cannot read", lambda: next(batches), same_text=False)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("change", "text"), [
    (lambda path: open_source(path, ["label"]), "no dataset .label. in it. The only dataset of a NIfTI file is .image"),
    (lambda path: open_source([path, path], ["image"], one_each=True), "a NIfTI file always holds one sample"),
    (lambda path: open_source(f"https://example.org/{path.name}", ["image"]), "nibabel reads files, not URLs"),
    (lambda path: open_source([path, path.with_name("case1.nii.gz")], ["image"]), "dataset 'image' has samples of"),
    (lambda path: open_source(path.with_name("case2.nii.gz"), ["image"]), "but a volume is"),
    (lambda path: open_source(path.with_name("none.nii"), ["image"]), "No such file"),
])  # fmt: skip
def test_what_does_not_fit_raises(comm: Any, shared_tmp_path: Path, change: Any, text: str) -> None:
    paths = saved(comm, shared_tmp_path, volume(0), volume(0, 2), volume(0, 2, 2))
    raises_everywhere(comm, DataError, text, lambda: change(paths[0]))


@pytest.mark.ranks(1)
def test_a_missing_nibabel_names_the_extra(comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = saved(comm, tmp_path, volume(0))
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "nibabel":
            raise ImportError("No module named 'nibabel'")
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"nibabel is not installed: pip install 'distconv\[medical\]'"):
        open_source(path, ["image"], comm)
