"""zarr groups of both formats: no codec that runs code, no link out of the folder, nothing that is half written."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from distconv.data.formats.zarr_groups import UNFINISHED, ZarrGroup
from distconv.errors import DataError
from tests.distconv.data import stored_samples
from tests.distconv.data.stored_samples import arrays

zarr = pytest.importorskip("zarr")

BOX = (slice(2, 4), slice(0, 3), slice(5, 9), slice(1, 20))


@pytest.mark.parametrize("version", [2, 3])
def test_boxes_of_both_formats_and_of_shards(tmp_path: Path, version: int) -> None:
    path = stored_samples.write(tmp_path / "data", f"zarr-v{version}")
    group = zarr.open_group(path, mode="a")
    group.create_array("family", data=np.array([3, 1, 2, 0, 1, 1, 2]))
    group.create_group("train").create_array("image", data=arrays()["image"][:4], chunks=(1, 3, 8, 8))
    group["train"].attrs["threshold"] = 0.4
    if version == 3:
        shape = {"chunks": (1, 3, 4, 4), "shards": (1, 3, 24, 20)}
        group.create_array("shards", data=arrays()["image"], **shape)
    store = ZarrGroup(path, ["image", "train/image", *(["shards"] if version == 3 else [])])
    for name in store.names:
        assert np.array_equal(store.read(name, BOX), arrays()["image"][BOX])
    assert store.stored["image"].chunks == (1, 3, 4, 4)
    assert store.column("family") == [3, 1, 2, 0, 1, 1, 2] and store.column("image") is None
    assert store.attribute("threshold", "train") == 0.4 and store.attribute("threshold", "/") is None


def test_what_is_missing_is_named_with_what_is_there(tmp_path: Path) -> None:
    path = stored_samples.write(tmp_path / "data", "zarr-v3")
    zarr.open_group(path, mode="a").create_group("train")
    with pytest.raises(DataError, match="there is no dataset 'none' in it; at its top are image, label"):
        ZarrGroup(path, ["none"])
    with pytest.raises(DataError, match="'train' is a group, not a dataset"):
        ZarrGroup(path, ["train"])
    with pytest.raises(DataError, match="cannot be opened as a zarr group"):
        ZarrGroup(tmp_path / "none", ["image"])


@pytest.mark.parametrize(
    ("where", "codec"), [("filters", "pickle"), ("compressor", "json2"), ("compressor", "jenkins_lookup3")]
)
def test_codecs_that_do_more_than_compute_are_refused(tmp_path: Path, where: str, codec: str) -> None:
    path = stored_samples.write(tmp_path / "data", "zarr-v2")
    note = path / "image" / ".zarray"
    metadata = json.loads(note.read_text())
    metadata[where] = [{"id": codec}] if where == "filters" else {"id": codec}
    note.write_text(json.dumps(metadata))
    ZarrGroup(path, ["label"])
    # zarr itself knows what turns bytes into objects, and wants an array of objects then.
    with pytest.raises(DataError, match=f"is encoded by {codec}, which may run code|No Zarr data type found.*{codec}"):
        ZarrGroup(path, ["image"])


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    (tmp_path / "bomb" / "x").mkdir(parents=True)
    (tmp_path / "bomb" / ".zgroup").write_text('{"zarr_format": 2}')
    metadata = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|O", "order": "C", "fill_value": None}
    note = metadata | {"compressor": None, "filters": [{"id": "pickle", "protocol": 5}]}
    (tmp_path / "bomb" / "x" / ".zarray").write_text(json.dumps(note))
    (tmp_path / "bomb" / "x" / "0").write_bytes(pickle.dumps(np.array([Bomb()], dtype=object)))
    with pytest.raises(DataError, match=r"is |cannot be opened"):
        ZarrGroup(tmp_path / "bomb", ["x"])
    assert not (tmp_path / "exploded").exists()


def test_unknown_codecs_inside_of_shards_are_found(tmp_path: Path) -> None:
    path = tmp_path / "data.zarr"
    group = zarr.open_group(path, mode="w")
    group.create_array("x", shape=(4, 4), chunks=(1, 4), shards=(4, 4), dtype="f4")
    note = path / "x" / "zarr.json"
    metadata = json.loads(note.read_text())
    inner = metadata["codecs"][0]["configuration"]["codecs"]
    inner.append({"name": "numcodecs.json2", "configuration": {}})
    note.write_text(json.dumps(metadata))
    with pytest.raises(DataError, match=r"json2|cannot be opened"):
        ZarrGroup(path, ["x"])


def test_chunks_that_links_place_elsewhere_and_pipes_are_not_read(tmp_path: Path) -> None:
    path = stored_samples.write(tmp_path / "data", "zarr-v3")
    chunk = path / "label" / "c" / "0" / "0" / "0"
    chunk.replace(tmp_path / "stolen")
    chunk.symlink_to(tmp_path / "stolen")
    store = ZarrGroup(path, ["label"])
    assert np.array_equal(store.read("label", (slice(0, 1), slice(4, 8), slice(0, 4))), arrays()["label"][:1, 4:8, :4])
    for _ in range(2):
        with pytest.raises(DataError, match=r"leads to .*stolen, out of the folder"):
            store.read("label", (slice(0, 1), slice(0, 1), slice(0, 1)))
        chunk.unlink()
        chunk.symlink_to("../../../../../../stolen")
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(DataError, match="not a regular file"):
        store.read("label", (slice(0, 1), slice(0, 1), slice(0, 1)))


def test_what_is_being_written_and_what_is_no_number_is_refused(tmp_path: Path) -> None:
    path = stored_samples.write(tmp_path / "data", "zarr-v3")
    group = zarr.open_group(path, mode="a")
    group.create_array("times", data=np.array(["2020-01-01"], "datetime64[s]"))
    with pytest.raises(DataError, match="'times' is datetime64"):
        ZarrGroup(path, ["times"])
    group.attrs[UNFINISHED] = "3 of 7"
    with pytest.raises(DataError, match="is incomplete: its writer has not finished"):
        ZarrGroup(path, ["image"])


def test_damaged_chunks_are_an_error_with_a_place(tmp_path: Path) -> None:
    path = stored_samples.write(tmp_path / "data", "zarr-v3")
    (path / "label" / "c" / "3" / "0" / "0").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"cannot read \[3:4, 0:24, 0:20\] of dataset 'label'"):
        ZarrGroup(path, ["label"]).read("label", (slice(3, 4), slice(0, 24), slice(0, 20)))
