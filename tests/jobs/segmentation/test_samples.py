"""Images and label maps opened for training: their scaling, their classes; what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import distconv as dc
from distconv.errors import DataError
from distconv.jobs.segmentation import samples as module
from distconv.jobs.segmentation.samples import open_samples
from tests.distconv.data.sample_files import common
from tests.jobs.segmentation.label_maps import GRIDS, arrays, written

pytestmark = pytest.mark.ranks(1, 2, 3)


def test_values_are_scaled_by_the_training_images_and_places_counted(comm: Any, shared_tmp_path: Path) -> None:
    samples = open_samples(written(shared_tmp_path / "a.h5", comm), comm, ignore=255)
    assert (samples.extents, samples.axes, samples.classes) == ((2, 9, 11), "hw", 3)
    assert (samples.count("train"), samples.count("test"), samples.count("other")) == (5, 3, 0)
    image, label = arrays()
    mean, std = image.mean((0, 2, 3)), image.std((0, 2, 3))
    assert samples.moments.mean == pytest.approx(mean) and samples.moments.std == pytest.approx(std)
    assert samples.places.tolist() == [(label == index).sum() for index in range(3)]
    (batch,) = samples.loader("test", dc.ProcessGrid(comm, **GRIDS[comm.size]), 3).epoch(0)
    held_out, labels = arrays(samples=3, seed=1)
    scaled = (held_out - mean.reshape(-1, 1, 1)) / std.reshape(-1, 1, 1)
    assert np.abs(dc.gather(batch.tensors[0]).numpy() - scaled).max() < 1e-6
    assert np.array_equal(dc.gather(batch.tensors[1]).numpy(), labels)
    samples.close()


def test_samples_at_the_top_and_held_out_ones_elsewhere(comm: Any, shared_tmp_path: Path) -> None:
    for name, seed, samples in (("a", 0, 5), ("b", 1, 3)):
        written(shared_tmp_path / f"{name}.h5", comm, **{"/": arrays(seed=seed, samples=samples)})
    alone = open_samples(shared_tmp_path / "a.h5", comm, ignore=255)
    assert list(alone.groups) == ["train"]
    found = open_samples(shared_tmp_path / "a.h5", comm, test_path=shared_tmp_path / "b.h5", ignore=255)
    assert (found.count("train"), found.count("test")) == (5, 3)
    written(shared_tmp_path / "c.h5", comm, train=arrays(), val=arrays(samples=2))
    assert open_samples(shared_tmp_path / "c.h5", comm, ignore=255).count("test") == 2


IMAGE, LABEL = arrays()
OTHER = np.zeros((5, 2, 9, 10))


@pytest.mark.parametrize(
    ("groups", "options", "reason"),
    [
        ({"train": (IMAGE, LABEL)}, {"classes": 2}, "has the label 2 in "),
        ({"train": (IMAGE, LABEL)}, {}, "(0, 1, 2, 255), which would make 256 classes. If 255 marks pixels without"),
        ({"train": (IMAGE, 255 * (LABEL > 1))}, {}, "2 different labels (0, 255), which would make 256 classes"),
        ({"train": (IMAGE, LABEL)}, {"classes": 3}, "labels are 0 to 2. Correct the data, or give --classes or --ign"),
        ({"train": (IMAGE, IMAGE[:, 0])}, {}, "labels are classes: 0, 1, 2, ..."),
        ({"train": (IMAGE, LABEL - 10000.0)}, {}, "has the label -10000 in"),
        (
            {"train": (IMAGE, LABEL[:, None])},
            {},
            "dataset 'train/label' is (5, 1, 9, 11), but labels of images (5, 2, 9, 11)",
        ),
        (
            {"train": (IMAGE, LABEL), "test": (OTHER, OTHER[:, 0])},
            {},
            "have the shape (2, 9, 10), but the training samples have",
        ),
        ({"train": (IMAGE[:0], LABEL[:0])}, {}, "'train/image' has no samples"),
        ({"train": (IMAGE[:, 0, 0], LABEL[:, 0])}, {}, "is (5, 11), but images are (samples, channels, ...)"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(
    comm: Any, shared_tmp_path: Path, groups: Any, options: Any, reason: str
) -> None:
    path = written(shared_tmp_path / "a.h5", comm, **groups)
    with pytest.raises(DataError) as caught:
        open_samples(path, comm, **options)
    assert reason in common(comm, caught.value)


def test_files_are_closed_with_the_samples(comm: Any, shared_tmp_path: Path) -> None:
    samples = open_samples(written(shared_tmp_path / "a.h5", comm), comm, ignore=255)
    sources = {name: group.source for name, group in samples.groups.items()}
    box = (dc.Interval(0, 1), dc.Interval(0, 1), dc.Interval(0, 2), dc.Interval(0, 2))
    assert {source.read(f"{name}/image", box).shape for name, source in sources.items()} == {(1, 1, 2, 2)}
    samples.close()
    for name, source in sources.items():
        with pytest.raises((DataError, ValueError)):
            source.read(f"{name}/image", box)


@pytest.mark.parametrize(
    ("labels", "largest", "refused"),
    [({0, 31}, 31, False), ({0, 32}, 32, True), (set(range(16)), 32, False), (set(range(15)), 32, True)],
)
def test_a_large_label_among_few_makes_no_classes(labels: set[int], largest: int, refused: bool) -> None:
    train: Any = SimpleNamespace(source=SimpleNamespace(path="a.h5"), label="label")
    given = sorted({*labels, largest})
    with pytest.raises(DataError) if refused else nullcontext() as caught:
        module._check_largest(train, set(given) if len(labels) < 3 else labels, largest)
    if refused:
        shown = "0, 32" if len(labels) < 3 else "0, 1, 2, ..., 14"
        count = len(given) if len(labels) < 3 else len(labels)
        assert f"'label' has {count} different labels ({shown}), which would make 33 classes" in str(caught.value)


def test_labels_of_a_block_are_whole_and_near_each_other() -> None:
    assert module._count_labels(np.array([[-3, 2], [2, 0]]), "x") == {-3: 1, 0: 1, 2: 2}
    assert module._count_labels(np.array([0.0, 2**16 - 1]), "x") == {0: 1, 2**16 - 1: 1}
    for wrong in ([0, 2**16], [0.5, 1.0], [0.0, np.inf], [np.nan]):
        with pytest.raises(DataError, match=r"x has values from .*, but labels are classes"):
            module._count_labels(np.array(wrong), "x")
