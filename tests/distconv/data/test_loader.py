"""Batches are the same samples, mirrored alike, on any grid; read errors reach all ranks in their step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distconv as dc
from distconv.data.channel_statistics import moments
from distconv.data.hdf5 import SampleFile
from distconv.data.loader import Field, Loader
from distconv.errors import DataError
from tests.distconv.data.sample_files import LAYOUTS, SAMPLES, arrays, common, write

pytestmark = pytest.mark.ranks(1, 2, 4)

ODD = {"h": (1.0, 1.0, -1.0), "w": (1.0, -1.0, 1.0)}
EXCHANGED = ((0, -1.0), (2, 1.0), (1, 1.0))
LAST = torch.channels_last
FIELDS = (
    Field("x", "nchw", torch.float64, odd=ODD, exchanged=EXCHANGED),
    Field("y", "nhw", torch.float32),
)
GRIDS = {1: ["n=1"], 2: ["n=2", "h=2", "w=2", "c=2"], 4: ["n=4", "h=4", "h=2,w=2", "n=2,h=2", "c=2,h=2"]}


def grids(comm: Any) -> list[dc.ProcessGrid]:
    return [dc.ProcessGrid(comm, **dc.parse_grid(text)) for text in GRIDS[comm.size]]


@pytest.fixture
def file(comm: Any, shared_tmp_path: Path) -> Iterator[SampleFile]:
    """An intact file, opened on all ranks."""
    write(shared_tmp_path / "good.h5", comm)
    with SampleFile(shared_tmp_path / "good.h5", LAYOUTS, comm) as opened:
        yield opened


def expected(loader: Loader, epoch: int, samples: tuple[int, ...]) -> tuple[Any, Any]:
    x, y = arrays()
    images, labels = [], []
    for sample in samples:
        image, label = x[sample].astype(np.float64), y[sample].astype(np.float32)
        begins = loader.crop_offsets(epoch, sample)
        window = tuple(slice(begins.get(a, 0), begins.get(a, 0) + loader.crop.get(a, 99)) for a in "hw")
        image, label = image[(slice(None), *window)], label[window]
        for axis in loader.mirrored_axes(epoch, sample):
            dim = {"h": -2, "w": -1}[axis]
            image = np.flip(image, dim) * np.array(ODD[axis]).reshape(3, 1, 1)
            label = np.flip(label, dim)
        if loader.is_transposed(epoch, sample):
            image, label = np.stack([-image[0].T, image[2].T, image[1].T]), label.T
        images.append(image)
        labels.append(label)
    return np.stack(images), np.stack(labels)


@pytest.mark.long
@pytest.mark.parametrize(
    ("batch", "crop"), [(1, {}), (3, {}), (4, {"h": 5, "w": 6}), (7, {"w": 7}), (3, {"h": 7, "w": 7})]
)
def test_batches_equal_the_cropped_mirrored_and_transposed_samples_on_any_grid(
    comm: Any, file: SampleFile, batch: int, crop: dict[str, int]
) -> None:
    for grid in grids(comm):
        square = len(set(crop.values())) == 1 and len(crop) == 2
        loader = Loader(file, FIELDS, grid, batch, seed=3, mirror="hw", transpose=square, crop=crop)
        assert square == any(loader.is_transposed(0, sample) for sample in range(SAMPLES))
        assert bool(crop) == (len({tuple(loader.crop_offsets(0, sample).values()) for sample in range(SAMPLES)}) > 1)
        for epoch in (0, 1):
            seen: list[int] = []
            for each in loader.epoch(epoch):
                image, label = expected(loader, epoch, each.samples)
                assert np.array_equal(dc.gather(each.tensors[0]).numpy(), image)
                assert np.array_equal(dc.gather(each.tensors[1]).numpy(), label)
                seen += each.samples
            assert sorted(seen) == list(range(SAMPLES))


def test_every_way_to_mirror_occurs_and_changes_with_the_epoch(comm: Any, file: SampleFile) -> None:
    loader = Loader(file, FIELDS, dc.ProcessGrid(comm, n=comm.size), 2, mirror="hw")
    drawn = [[loader.mirrored_axes(epoch, sample) for sample in range(SAMPLES)] for epoch in range(5)]
    assert {text for row in drawn for text in row} == {"", "h", "w", "hw"}
    assert drawn[0] != drawn[1]
    assert list(loader.order(0)) != list(loader.order(1))


@pytest.mark.fault(25)
def test_images_are_read_into_channels_last_blocks(comm: Any, file: SampleFile) -> None:
    fields = [Field("x", "nchw", torch.float64, memory_format=order) for order in (LAST, torch.contiguous_format)]
    for grid in grids(comm):
        for batch in Loader(file, fields, grid, 3, mirror="hw", seed=2).epoch(0):
            last, contiguous = batch.tensors
            assert torch.equal(dc.gather(last), dc.gather(contiguous))
            assert last.stride() == torch.empty(last.shape).contiguous(memory_format=LAST).stride()
            assert last.local.is_contiguous(memory_format=LAST) and contiguous.local.is_contiguous()


def test_the_last_smaller_batch_is_kept_or_dropped(comm: Any, file: SampleFile) -> None:
    grid = dc.ProcessGrid(comm, n=comm.size)
    kept = [len(b.samples) for b in Loader(file, FIELDS, grid, 4).epoch(0)]
    dropped = [len(b.samples) for b in Loader(file, FIELDS, grid, 4, drop_last=True).epoch(0)]
    assert (kept, dropped) == ([4, 3], [4])


@pytest.mark.fault(39)
def test_a_read_error_on_one_rank_reaches_all_in_its_step(
    comm: Any, file: SampleFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Loader(file, FIELDS, dc.ProcessGrid(comm, n=comm.size), 2)
    read = loader._read

    # With four ranks only the first two have rows of a batch of two.
    def fails(into: Any, each: Field, sample: int, space: Any, epoch: int) -> None:
        if sample in loader.order(epoch)[2:4]:
            raise OSError(5, "Input/output error")
        read(into, each, sample, space, epoch)

    if comm.rank == min(comm.size, 2) - 1:
        monkeypatch.setattr(loader, "_read", fails)
    steps = 0
    with pytest.raises(DataError) as caught:
        for _ in loader.epoch(0):
            steps += 1
    assert steps == 1
    assert "[Errno 5] Input/output error" in common(comm, caught.value)


@pytest.mark.fault(37)
def test_a_file_replaced_between_epochs_is_found_at_the_next_epoch(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    write(path, comm)
    with SampleFile(path, LAYOUTS, comm) as file:
        loader = Loader(file, FIELDS, dc.ProcessGrid(comm, n=comm.size), 4)
        assert len(list(loader.epoch(0))) == 2
        write(path.with_suffix(".new"), comm)
        if comm.rank == 0:
            path.with_suffix(".new").replace(path)
        comm.Barrier()
        with pytest.raises(DataError) as caught:
            next(loader.epoch(1))
    assert "has been replaced by another file" in common(comm, caught.value)


def test_no_thread_is_left_when_an_epoch_is_not_finished(comm: Any, file: SampleFile) -> None:
    epoch = Loader(file, FIELDS, dc.ProcessGrid(comm, n=comm.size), 2).epoch(0)
    next(epoch)
    epoch.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("distconv-loader")]


def test_a_batch_that_cannot_be_made_is_refused(comm: Any, file: SampleFile) -> None:
    grid = dc.ProcessGrid(comm, n=comm.size)
    with pytest.raises(DataError, match="no batch of 8 can be made of the 7 samples of 'x'"):
        Loader(file, FIELDS, grid, 8, drop_last=True)
    with pytest.raises(DataError, match="no batch of 0"):
        Loader(file, FIELDS, grid, 0)
    with pytest.raises(DataError, match="samples of 9 x 10 cannot be transposed"):
        Loader(file, FIELDS, grid, 2, transpose=True)


@pytest.mark.ranks(1, 2)
def test_a_crop_may_begin_wherever_it_fits(comm: Any, file: SampleFile) -> None:
    loader = Loader(file, FIELDS, grids(comm)[0], 3, crop={"h": 7, "w": 10})
    places = [loader.crop_offsets(epoch, sample) for epoch in range(20) for sample in range(SAMPLES)]
    assert {place["h"] for place in places} == {0, 1, 2}  # of 9 rows
    assert {place["w"] for place in places} == {0}
    orders = [tuple(loader.order(epoch)) for epoch in range(3)]
    assert len(set(orders)) == 3 and orders[0] == tuple(loader.order(0))


def batches(comm: Any, path: Path, field: Field, **options: Any) -> Any:
    """All samples of one field over the job's last grid, gathered."""
    with SampleFile(path, [field.dataset], comm) as file:
        loader = Loader(file, [field], grids(comm)[-1], SAMPLES, shuffle=False, **options)
        (batch,) = loader.epoch(0)
        return dc.gather(batch.tensors[0])


def test_integers_stay_integers_and_a_number_per_sample_is_a_field(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    target, mask = np.arange(SAMPLES, dtype="f8") / 3, arrays()[1] > 0
    write(path, comm, target=target, mask=mask, kind=np.arange(SAMPLES, dtype="u2"))
    label = batches(comm, path, Field("y", "nhw"))
    assert label.dtype == torch.int64 and np.array_equal(label.numpy(), arrays()[1])
    assert torch.equal(batches(comm, path, Field("mask", "nhw")), torch.from_numpy(mask))
    assert torch.equal(batches(comm, path, Field("kind", "n")), torch.arange(SAMPLES))
    assert torch.equal(batches(comm, path, Field("target", "n")), torch.from_numpy(target).float())
    exact = batches(comm, path, Field("target", "n", torch.float64, shift=1.0, scale=[4.0]), mirror="")
    assert np.array_equal(exact.numpy(), (target - 1) / 4)


def test_bfloat16_is_what_torch_rounds_to(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    write(path, comm)
    shift, scale = np.array([0.1, 0.2, 0.3]), np.array([1.0, 2.0, 3.0])
    x = torch.from_numpy(arrays()[0])
    assert torch.equal(batches(comm, path, Field("x", "nchw", torch.bfloat16)), x.bfloat16())
    expected = (x - torch.tensor(shift).float().view(3, 1, 1)) / torch.tensor(scale).float().view(3, 1, 1)
    found = batches(comm, path, Field("x", "nchw", torch.bfloat16, shift, scale))
    assert torch.equal(found, expected.bfloat16())


def test_a_value_that_the_dtype_cannot_hold_is_named_on_all_ranks(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    write(path, comm, z=np.array([1, 2, 3, 4, 300, 6, 7]))
    with pytest.raises(DataError, match="sample 4 of dataset 'z' has the value 300 of int64") as caught:
        batches(comm, path, Field("z", "n", torch.uint8))
    assert "cannot hold. Give its Field another dtype" in common(comm, caught.value)


@pytest.mark.parametrize(
    ("field", "options", "reason"),
    [
        (Field("x", "nhw"), {}, r"Field\('x', 'nhw'\): the dataset is \(7, 3, 9, 10\). Give dims a letter for each"),
        (Field("x", "chwn"), {}, "n for the samples first"),
        (Field("none", "nhw"), {}, "dataset 'none' is not open, but 'x', 'y'"),
        (Field("x", "nchw", shift=[1.0, 2.0]), {}, r"shift is \[1\., 2\.\] \(2 numbers\) for 3 channels"),
        (Field("x", "nchw", scale=np.ones(4)), {}, "scale is .* for 3 channels"),
        (Field("x", "nchw", scale=[1.0, 0.0, 1.0]), {}, "none may be 0"),
        (Field("x", "nchw", shift=[1.0, np.nan, 1.0]), {}, "one finite number for each channel"),
        (Field("y", "nhw", scale=np.ones(9)), {}, "scale is .* for 1 channels"),
        (Field("x", "nchw", odd={"h": (1.0, -1.0)}), {}, r"odd\['h'\] has 2 entries for 3 channels"),
        (
            Field("x", "nchw", odd={"z": (1.0, -1.0, 1.0)}),
            {},
            "odd along 'z', but the samples extend along 'hw'",
        ),
        (Field("x", "nchw", exchanged=((0, 1.0),)), {}, "exchanged has 1 entries for 3 channels"),
        (
            Field("x", "nchw", exchanged=((0, 1.0), (1, 1.0), (3, 1.0))),
            {},
            "exchanged names channels",
        ),
        (Field("x", "nchw", "float32"), {}, "dtype is 'float32'. Give one of torch"),  # type: ignore[arg-type]
        (Field("y", "nhw", memory_format=LAST), {}, r"memory_format is torch.channels_last, but the dataset is \(7, 9"),
        (Field("x", "nchw", memory_format=torch.channels_last_3d), {}, "channels_last_3d for volumes"),
        (Field("x", "nchw"), {"mirror": "z"}, "mirror along 'z', but the samples extend along 'hw'"),
        (Field("x", "nchw"), {"mirror": "c"}, "mirror along 'c'"),
        (Field("x", "nchw"), {"mirror": "hh"}, "each once"),
        (Field("x", "nchw"), {"crop": {"c": 2}}, "crop c=2: samples have nothing there"),
        (Field("x", "nc-w"), {"mirror": "h"}, "mirror along 'h', but the samples extend along 'w'"),
        (Field("y", "n-w"), {"mirror": "h"}, "does not say which dimension is which"),
    ],
)
@pytest.mark.ranks(2)
def test_a_field_that_does_not_fit_is_refused(
    comm: Any, file: SampleFile, field: Field, options: Any, reason: str
) -> None:
    others = [Field("x", "nchw")] if field.dataset == "y" else []
    with pytest.raises(DataError, match=reason) as caught:
        Loader(file, [*others, field], dc.ProcessGrid(comm, h=2), 2, **options)
    common(comm, caught.value)
    with pytest.raises(DataError, match="dataset 'none' is not open"):
        moments(file, "none")


def test_fields_of_other_extents_are_not_cropped_together(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    write(path, comm, small=arrays()[1][:, ::2])
    fields = [Field("x", "nchw"), Field("small", "nhw")]
    with (
        SampleFile(path, ["x", "small"], comm) as file,
        pytest.raises(DataError, match="'x' has 9 along h, where others have 5"),
    ):
        Loader(file, fields, grids(comm)[0], 2, crop={"h": 4})


def test_a_number_per_sample_is_loaded_beside_transposed_images(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "samples.h5"
    write(path, comm, target=np.arange(SAMPLES, dtype="f4"))
    with SampleFile(path, ["x", "target"], comm) as file:
        fields = [Field("x", "nchw"), Field("target", "n")]
        options: dict[str, Any] = {"mirror": "hw", "transpose": True, "crop": {"h": 7, "w": 7}}
        for batch in Loader(file, fields, grids(comm)[-1], 3, **options).epoch(0):
            assert dc.gather(batch.tensors[1]).tolist() == list(batch.samples)
