"""NIfTI volumes that ranks write together: nibabel reads the values and the space that were written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distconv as dc
from distconv.errors import DataError
from distconv.writing import count_written_rows, open_output
from tests.distconv.layouts import grid_over, raises_everywhere

nibabel = pytest.importorskip("nibabel")
pytestmark = pytest.mark.ranks(1, 2, 3)

AFFINE = np.array([[0, -2, 0.5, 10], [1.5, 0, 0, -20], [0, 0.25, 3, 5], [0, 0, 0, 1]])
X = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 2, 7, 4, 5)))
GRIDS = {1: {"n": 1}, 2: {"h": 2}, 3: {"d": 3}}


def of_file(path: Path) -> np.ndarray:
    values = nibabel.load(path).get_fdata()
    return np.moveaxis(values.reshape(*values.shape[:3], -1), -1, 0)


@pytest.mark.parametrize("suffix", ["nii", "nii.gz"])
@pytest.mark.parametrize(
    "x", [X, X[:, :1].float(), X[..., :2], X[:, 0].mul(9).to(torch.int16), X.bfloat16(), X.long()],
    ids=["channels", "one channel", "fewer slices than ranks", "labels", "half precision", "integers"],
)  # fmt: skip
def test_nibabel_reads_what_was_written(comm: Any, shared_tmp_path: Path, suffix: str, x: torch.Tensor) -> None:
    path, dims = shared_tmp_path / f"y.{suffix}", "ncdhw" if x.dim() == 5 else "ndhw"
    attrs = {"affine": AFFINE, "affine_code": 1, "space_units": "mm"}
    dc.write(dc.scatter(x, grid_over(comm, **GRIDS[comm.size]), dims=dims), path, attrs=attrs)
    comm.Barrier()
    image = nibabel.load(path)
    assert np.array_equal(of_file(path), x.double().reshape(-1, *x.shape[-3:]).numpy())
    assert np.array_equal(image.affine, AFFINE) and image.header["sform_code"] == 1
    assert image.header.get_xyzt_units()[0] == "mm"
    assert np.allclose(image.header.get_zooms()[:3], np.sqrt((AFFINE[:3, :3] ** 2).sum(0)))
    comm.Barrier()
    assert [each.name for each in shared_tmp_path.iterdir()] == [path.name]


@pytest.mark.ranks(2)
def test_a_matrix_without_a_shear_is_in_both_forms_of_the_header(comm: Any, shared_tmp_path: Path) -> None:
    affine = np.array([[0, -2, 0, 10], [1.5, 0, 0, -20], [0, 0, 3, 5], [0, 0, 0, 1]])
    dc.write(dc.scatter(X, grid_over(comm, h=2)), shared_tmp_path / "y.nii.gz", attrs={"affine": affine})
    comm.Barrier()
    header = nibabel.load(shared_tmp_path / "y.nii.gz").header
    assert np.allclose(header.get_qform(), affine, atol=1e-5) and header["qform_code"] == header["sform_code"] == 2


@pytest.mark.ranks(1)
def test_a_long_dimension_makes_it_nifti_2(comm: Any, tmp_path: Path) -> None:
    x = torch.arange(40_000.0).reshape(1, 1, 40_000, 1, 1)
    dc.write(dc.scatter(x, grid_over(comm, n=1)), tmp_path / "y.nii")
    image = nibabel.load(tmp_path / "y.nii")
    assert isinstance(image, nibabel.Nifti2Image) and np.array_equal(image.get_fdata().ravel(), x.ravel())


@pytest.mark.ranks(2, 3)
def test_a_folder_of_volumes_is_resumed(comm: Any, shared_tmp_path: Path) -> None:
    x = torch.cat([X, X + 1, X + 2])
    note = {"files": ["a.nii.gz", "c.nii.gz", "b.nii.gz"], "weights": "w"}
    labels = dc.data.coordinates.VariableLabels(
        attributes={"affine": [float(v) for k in range(3) for v in (AFFINE + k * np.eye(4, k=3)).ravel()]}
    )
    grid, path = grid_over(comm, h=comm.size), shared_tmp_path / "out"

    def opened(note: Any = note) -> Any:
        return open_output(path, "y", x.shape, x.dtype, comm, note=note, labels=labels)

    output = opened()
    output.write(0, dc.scatter(x[:2] + 9, grid))
    assert not path.exists() and count_written_rows(path, comm) == 2
    with pytest.raises(DataError, match="contains another unfinished output"):
        opened({**note, "weights": "v"})
    output = opened()
    output.write(0, dc.scatter(x[:1], grid))
    output.write(1, dc.scatter(x[1:], grid))
    output.finish()
    comm.Barrier()
    assert sorted(each.name for each in shared_tmp_path.rglob("*")) == ["a.nii.gz", "b.nii.gz", "c.nii.gz", "out"]
    for row, name in enumerate(note["files"]):
        assert np.array_equal(of_file(path / name), x[row].numpy())
        assert np.array_equal(nibabel.load(path / name).affine, AFFINE + row * np.eye(4, k=3))
    comm.Barrier()
    with pytest.raises(DataError, match="already exists"):
        opened()


@pytest.mark.parametrize(("x", "more", "text"), [
    (torch.cat([X, X]), {}, r"is one sample \(1, C, X, Y, Z\) or \(1, X, Y, Z\), not \(2, 2"),
    (X[0, 0], {}, "is one sample"),
    (X[:, :, :0], {}, "is one sample"),
    (X, {"dims": ("n", "c", "x", "y", "z")}, "stores no names of dimensions"),
    (X, {"attrs": {"units": "K"}}, "stores no attribute 'units'"),
    (X, {"attrs": {"affine": np.eye(3)}}, r"attribute 'affine' is .* Give a matrix \(4, 4\)"),
    (X > 0, {}, "Convert the tensor"),
])  # fmt: skip
def test_what_is_no_volume_raises_on_all_ranks(
    comm: Any, shared_tmp_path: Path, x: torch.Tensor, more: Any, text: str
) -> None:
    y = dc.scatter(x, grid_over(comm, h=comm.size), dims="n" + "-" * (x.dim() - 2) + "h")
    raises_everywhere(comm, DataError, text, lambda: dc.write(y, shared_tmp_path / "y.nii.gz", **more))


@pytest.mark.ranks(2)
def test_several_tensors_do_not_fit_in_one_volume(comm: Any, shared_tmp_path: Path) -> None:
    y = dc.scatter(X, grid_over(comm, h=2))
    raises_everywhere(comm, DataError, "is one sample", lambda: dc.write({"a": y, "b": y}, shared_tmp_path / "y.nii"))


@pytest.mark.ranks(2)
def test_a_missing_nibabel_on_one_rank_raises_on_all(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = dc.scatter(X, grid_over(comm, h=2))
    if comm.rank == 1:
        monkeypatch.setitem(sys.modules, "nibabel", None)
    raises_everywhere(comm, DataError, r"nibabel is not installed: pip install 'distconv\[medical\]'",
                      lambda: dc.write(y, shared_tmp_path / "y.nii"))  # fmt: skip
