"""One rank alone sees other sounds: the same error on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distconv.jobs.sequence.mfcc import CoefficientRecipe
from distconv.jobs.sequence.samples import SequenceSamples
from tests.distconv.one_rank_alone import Case, Rank, check
from tests.jobs.sequence.sound_files import write_file, write_folder

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(30)]


def opened(
    other: Callable[[Path], Any], usual: Callable[[Path], Any] = write_file, name: str = "s.h5"
) -> Callable[[Rank], object]:
    """Open what each rank finds below its own folder."""

    def call(r: Rank) -> object:
        r.pick(usual, other)(Path(name))
        return SequenceSamples(Path(name), r.comm, length=8, recipe=CoefficientRecipe())

    return call


CASES: dict[str, Case] = {
    "nothing there": (opened(lambda path: None), r"s\.h5.*\(on rank"),
    "text": (opened(lambda path: path.write_text("text")), r"s\.h5.*\(on rank"),
    "no labels": (opened(lambda path: write_file(path, label=None)), r"label.*\(on rank"),
    "other groups": (opened(lambda path: write_file(path, held_out=None)), "ranks disagree"),
    "a folder without sounds": (opened(Path.mkdir, write_folder, "sounds"), r"sounds.*\(on rank"),
    "a sound too many": (
        opened(
            lambda path: (
                write_folder(path)
                .joinpath("train/tone0/x.wav")
                .write_bytes(path.joinpath("train/tone0/0.wav").read_bytes())
            ),
            write_folder,
            "sounds",
        ),
        "sounds: ranks disagree",
    ),
    "a sound of another rate": (
        opened(lambda path: write_folder(path, rates=(8000, 4000)), write_folder, "sounds"),
        r"sounds.*\(on rank",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_error_is_raised_on_all_ranks(rank: Rank, name: str) -> None:
    check(rank, *CASES[name])
