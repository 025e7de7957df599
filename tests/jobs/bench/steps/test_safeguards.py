"""``distconv bench safeguards``: its tables and its figures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi4py import MPI

from distconv.checkpoint.manifest import commits
from distconv.communication import agreement
from distconv.jobs.bench.steps import safeguards
from distconv.placement import COMPARED_EVERY
from tests.jobs.bench import command
from tests.jobs.command_lines import assert_refused

printing = command.printing

TINY = ["--model", "mesh1k", "--width", "2", "--size", "128", "--batch", "1", "--repeats", "1"]


@pytest.mark.ranks(2)
def test_a_folder_that_is_not_there_is_one_error_on_all_ranks(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, ["bench", "safeguards", *TINY, "--directory", "/nowhere/at/all"], "/nowhere/at/all")


def test_the_printed_text_is_as_approved(
    printing: command.Printing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels, steps = [], []

    def scatter(sample: torch.Tensor, grid: Any) -> None:
        levels.append((agreement.level, tuple(sample.shape)))

    def save_during(saves: Any, step: Any) -> tuple[list[float], float]:
        step()
        saves.save()
        steps.append(len(steps) + 1.0)
        return [value / 1000 for value in steps], steps[-1] / 2000

    level = agreement.level
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(safeguards, "scatter", scatter)
    monkeypatch.setattr(safeguards.checkpoint.AsyncSave, "nbytes", 2_540_000)
    monkeypatch.setattr(safeguards._Saves, "save_during", save_during)
    words = ["--model", "vgg16", "--width", "2", "--size", "32", "--batch", "2", "--repeats", "3"]
    printing.approve("safeguards", safeguards, "safeguards", *words, "--directory", ".")
    assert levels == [(name, (2, 3, 32, 32)) for name in ("off", "plan") for _ in range(COMPARED_EVERY)]
    assert agreement.level == level and not list(tmp_path.iterdir())


def test_buckets_are_those_of_the_gradient_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safeguards, "BUCKET_BYTES", 8)
    parameters = [torch.full((size,), float(size)) for size in (1, 5, 2, 1, 1)]
    buckets = [[len(each) for each in bucket] for bucket in safeguards._buckets(parameters)]
    assert buckets == [[1, 1], [2], [5], [1]]


def test_a_save_during_steps_ends_with_the_last_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(safeguards, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    saves = safeguards._Saves(MPI.COMM_SELF, tmp_path, model, optimizer)
    assert saves.nbytes == len(saves._content) > (9 + 9) * 4
    saves.write_raw()
    saves.save()
    assert [commit.step for commit in commits(tmp_path)] == [2] and not list(tmp_path.glob("raw*"))
    answers = iter((False, False, True))

    class Saving:
        is_written = property(lambda self: next(answers))

        def finish(self, keep: int) -> None:
            assert keep == 1 and next(answers, None) is None

    monkeypatch.setattr(saves, "begin", Saving)
    steps: list[int] = []
    before = next(clock)
    assert saves.save_during(lambda: steps.append(1)) == ([1.0] * 3, 2.0)
    assert len(steps) == 3 and next(clock) == before + 11
