"""One rank alone cannot build its model, or write its folder: the same error on all ranks."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distconv.jobs.training.model_factory import build_classifier, build_model
from distconv.jobs.training.options import select_device
from distconv.jobs.training.run import prepare_run
from tests.distconv.one_rank_alone import Case, Rank, check

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(30)]

MODEL = "from torch import nn\ndef net(in_channels, classes): return nn.Linear(in_channels, classes)\n"


NUMBERS = itertools.count()


def build_in_folders(other: str | None, factory: str = "", build: Any = build_model) -> Callable[[Rank], object]:
    """Build a model of a module in the folder of each rank."""

    def call(r: Rank) -> object:
        module = f"own_net{next(NUMBERS)}"  # Python imports each name once
        text = r.pick(MODEL, other)
        if text is not None:
            Path(f"{module}.py").write_text(text)
        return build(r.pick("", factory) or f"{module}:net", r.comm, seed=0, in_channels=2, classes=3)

    return call


def prepared(change: Callable[[Path], object], **options: Any) -> Callable[[Rank], object]:
    """Prepare the folder of a run, after one rank has changed its own."""

    def call(r: Rank) -> object:
        r.pick(lambda path: None, change)(Path("out"))
        given = {"out": Path("out"), "resume": False, "overwrite": False} | options
        return prepare_run(argparse.Namespace(**given), SimpleNamespace(comm=r.comm))  # type: ignore[arg-type]

    return call


CASES: dict[str, Case] = {
    "no module": (build_in_folders(None), r"own_net.*\(on rank"),
    "a module that fails": (build_in_folders("1 / 0"), r"division by zero.*\(on rank"),
    "no factory": (build_in_folders("x = 1"), r"own_net.*\(on rank"),
    "a factory that fails": (
        build_in_folders("def net(in_channels): return [][in_channels]"),
        r"index out of range.*\(on rank",
    ),
    "no module of torch": (
        build_in_folders("def net(in_channels): return 3"),
        r"int, but must return a torch.nn.Module.*\(on rank",
    ),
    "an unknown model": (build_in_folders(MODEL, "no_such_net"), r"no_such_net.*\(on rank"),
    "a segmentation network": (build_in_folders(MODEL, "unet", build_classifier), r"unet.*\(on rank"),
    "device": (lambda r: select_device(r.pick("cpu", "cuda:77"), r.comm), r"--device cuda:77: .*\(on rank"),
    "a file in place of the folder": (prepared(Path.touch), r"out.*\(on rank"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_error_is_raised_on_all_ranks(rank: Rank, name: str) -> None:
    check(rank, *CASES[name])
