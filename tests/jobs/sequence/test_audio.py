"""Labelled sounds of files and folders."""

from __future__ import annotations

import os
import re

import h5py
import numpy as np
import pytest
import scipy.io.wavfile

import distconv as dc
from distconv.jobs.sequence.audio import Clips, Sounds, read_recordings
from distconv.jobs.sequence.mfcc import CoefficientRecipe, mfcc
from tests.jobs.sequence.sound_files import RATE, tones, write_file, write_folder


def test_a_file_and_a_folder_have_the_same_sounds(tmp_path):
    sounds, labels = tones()
    for found in (read_recordings(write_file(tmp_path / "a.h5")), read_recordings(write_folder(tmp_path / "folder"))):
        assert found.rate == RATE
        assert {group: len(clips.labels) for group, clips in found.groups.items()} == {"train": 9, "test": 3}
        order = np.argsort([np.abs(s.astype(int)).sum() for s in found.groups["test"].sounds])
        expected = np.argsort([np.abs(s.astype(int)).sum() for s in sounds[9:]])
        for one, other in zip(order, expected, strict=True):
            assert np.array_equal(found.groups["test"].sounds[one], sounds[9 + other])
            assert found.groups["test"].labels[one] == labels[9 + other]
    assert found.class_names == ("tone0", "tone1", "tone2")


def test_takes_below_five_are_held_out_and_without_a_word_none(tmp_path):
    found = read_recordings(write_file(tmp_path / "a.h5", held_out="take"))
    assert {group: len(clips.labels) for group, clips in found.groups.items()} == {"train": 9, "test": 3}
    found = read_recordings(write_file(tmp_path / "b.h5", held_out=None))
    assert list(found.groups) == ["train"]


def test_sounds_keep_their_channels_and_all_have_as_many(tmp_path):
    folder = write_folder(tmp_path, test=False)
    assert read_recordings(folder).channels == 1
    both = np.arange(1600, dtype=np.int16).reshape(800, 2)
    files = sorted(folder.glob("train/*/*.wav"))
    scipy.io.wavfile.write(files[0], RATE, both)
    with pytest.raises(
        dc.DataError, match=r"different sample rates or numbers of channels .*0\.wav 8000 Hz, 2 channel\(s\)"
    ):
        read_recordings(folder)
    for file in files[1:]:
        scipy.io.wavfile.write(file, RATE, both)
    loaded = read_recordings(folder)
    assert loaded.channels == 2 and np.array_equal(loaded.groups["train"].sounds[0], both)


@pytest.mark.fault(87)
@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"label": None}, "no label. Store sounds as the datasets audio, offset and label"),
        ({"offset": np.arange(5)}, "offset has 5 values up to 4 for 12 labels"),
        ({"offset": np.arange(13)[::-1]}, "must rise from the start of the first clip"),
        ({"offset": np.arange(13) * 10**6}, "offset has 13 values up to 12000000 for 12 labels"),
        ({"test": np.ones(12)}, "no training sounds found"),
        ({"offset": np.minimum(np.arange(13), 4)}, "sound 4 of 'train' is empty. Leave it out"),
        ({"audio": "text"}, "dataset 'audio' is a single value"),
        ({"audio": np.zeros((3, 4))}, "'audio' is float64 (3, 4), but must be one-dimensional, of numbers"),
        ({"audio": h5py.ExternalLink("/etc/passwd", "x")}, "'audio' lies in other files"),
        ({"offset": np.arange(13) / 2}, "'offset' is float64 (13,), but must be one-dimensional, of whole numbers"),
        ({"label": np.array([b"a"] * 12)}, "'label' is |S1 (12,), but must be one-dimensional, of whole numbers"),
        ({"label": np.full(12, -1)}, "labels are -1 to -1"),
        ({"label": np.full(12, 2**40)}, f"labels are {2**40} to {2**40}"),
        ({"test": np.ones(3)}, "heldout has 3 values, but there are 12 labels"),
    ],
)
def test_files_that_are_wrong_say_what_is(tmp_path, replaced, message):
    with pytest.raises(dc.DataError, match=re.escape(message)):
        read_recordings(write_file(tmp_path / "a.h5", **replaced))


@pytest.mark.fault(80)
@pytest.mark.parametrize("rate", ["fast", np.zeros(2), 0, float("nan")])
def test_a_rate_that_is_none_is_refused(tmp_path, rate):
    with h5py.File(write_file(tmp_path / "a.h5"), "a") as file:
        file.attrs["sample_rate"] = rate
    with pytest.raises(dc.DataError, match=r"the attribute sample_rate is .*, but must be a positive number of Hz"):
        read_recordings(tmp_path / "a.h5")


@pytest.mark.fault(80, 87)
def test_sounds_that_are_claimed_and_not_there_take_no_memory(tmp_path):
    path = write_file(tmp_path / "a.h5", audio=None)
    with h5py.File(path, "a") as file:
        file.create_dataset("audio", (1 << 30,), "i2", chunks=(1 << 20,))
    with pytest.raises(dc.DataError, match="dataset 'audio' is incomplete"):
        read_recordings(path)
    os.mkfifo(tmp_path / "b.h5")
    with pytest.raises(dc.DataError, match="is not a regular file"):
        read_recordings(tmp_path / "b.h5")


def test_folders_and_files_that_cannot_be_read_say_so(tmp_path):
    with pytest.raises(dc.DataError, match="sounds have different sample rates"):
        read_recordings(write_folder(tmp_path / "several", rates=(8000, 16000)))
    with pytest.raises(dc.DataError, match="no training sounds found"):
        read_recordings(tmp_path)
    broken = write_folder(tmp_path / "broken") / "train" / "tone0" / "0.wav"
    broken.write_bytes(b"no sound")
    with pytest.raises(dc.DataError, match="cannot be read as WAV"):
        read_recordings(tmp_path / "broken")
    with pytest.raises(dc.DataError, match="cannot be read as HDF5"):
        read_recordings(broken)
    with h5py.File(tmp_path / "rate.h5", "w") as file:
        file.update({name: np.zeros(2) for name in ("audio", "offset", "label")})
    with pytest.raises(dc.DataError, match="no attribute sample_rate"):
        read_recordings(tmp_path / "rate.h5")


@pytest.mark.ranks(1, 2, 3)
def test_ranks_share_the_coefficients(comm):
    sounds, labels = tones()
    found = Sounds(Clips(sounds, labels), RATE, CoefficientRecipe(), comm)
    for index, sound in enumerate(sounds):
        assert np.array_equal(found[index], mfcc(sound, RATE, CoefficientRecipe()))
