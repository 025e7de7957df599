"""``distconv bench pipeline``: its report, and what it refuses."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi4py import MPI

from distconv.jobs.bench import pipeline
from distconv.pipeline import schedule, simulate
from tests.jobs.bench import command
from tests.jobs.command_lines import assert_refused, parsed
from tests.jobs.verification.pretended import two_ranks

printing = command.printing

SMALL = "bench pipeline --width 2 --batch 4 --microbatches 2 --rounds 1 --steps 1"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("ppv", "message"),
    [
        ("2,x", "argument --ppv: "),
        ("0", "argument --ppv: "),
        ("2,4", "--ppv 2,4: 2 split points make 3 stages, but there are 2 ranks"),
    ],
)
def test_cuts_that_do_not_fit_are_refused_in_a_line(
    comm: Any, capsys: pytest.CaptureFixture[str], ppv: str, message: str
) -> None:
    assert_refused(capsys, [*SMALL.split(), "--ppv", ppv], message)


@pytest.mark.ranks(1)
def test_one_rank_is_refused(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = "distconv bench pipeline: needs one rank for each stage, at least 2. Start it with mpiexec -n 2."
    assert_refused(capsys, SMALL.split(), text)


NAMES = ("1f1b-sno", "torch 1F1B, gloo", "zero-bubble", "one rank", "DDP, gloo", "stale", "pipedream")


def test_the_report_is_as_approved(printing: command.Printing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["distconv"])
    times = {name: printing.times(count, 3) for count, name in enumerate(NAMES)}
    costs: Any = {"forward": [0.001, 0.002], "backward": [0.003, 0.005], "update": [0.0005, 0.0007]}
    traces = {
        "1f1b-sno": [simulate(schedule("1f1b-sno", 2, 4), **costs, transfer=wait) for wait in (0, 0.002, 0.003)],
        "zero-bubble": [simulate(schedule("zero-bubble", 2, 4), **costs, weight=[0.001, 0.002], transfer=0.002)],
    }
    for words, cuts in (([], ["features.7"]), (["--width", "6"], [4])):
        options = parsed("bench pipeline", "--batch", "12", "--microbatches", "4", *words)
        text, figures = pipeline._report(options, (cuts, [*cuts[:-1], 9]), times, traces)
        print(text, json.dumps(figures), sep="\n")
    printing.approve_printed("pipeline-report")


def test_each_variant_takes_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline._Bench, "_torch_pipe", lambda bench: "a pipe of torch")
    monkeypatch.setattr(pipeline._Bench, "_ddp", lambda bench: "replicas of torch")
    options = parsed("bench pipeline", *SMALL.split()[2:], "--model", "resnet20", "--steps", "3", "--rounds", "2")
    known, make = [], pipeline._Bench._pipe

    def make_pipe(bench: Any, schedule: str, cuts: Any, *microbatches: int) -> Any:
        known.append((schedule, cuts, *microbatches))
        return make(bench, schedule, [], *microbatches)

    monkeypatch.setattr(pipeline._Bench, "_pipe", make_pipe)
    bench = pipeline._Bench(MPI.COMM_SELF, options, ["a"], ["b"])
    assert (*bench.variants,) == NAMES
    assert known == [("1f1b-sno", ["a"], 2), ("zero-bubble", ["a"], 2), ("stale", ["b"]), ("pipedream", ["b"])]
    optimizer = pipeline._optimizer(torch.nn.Linear(1, 1).parameters())  # type: ignore[arg-type]
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.01, 0.9)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(pipeline, "time_interleaved", lambda *given, **named: asked.update(named) or given)
    assert bench.measure() == (MPI.COMM_SELF, bench.variants, 2) and asked == {"asleep": True}  # type: ignore[comparison-overlap]
    assert {name: len(found) for name, found in bench.traces().items()} == {"1f1b-sno": 6, "zero-bubble": 6}
    x, target = pipeline._data(5)
    assert x.shape == (5, 3, 32, 32) and target.shape == (5,) and torch.equal(x, pipeline._data(5)[0])
    taken: list[int] = []
    monkeypatch.setattr(pipeline, "timed_variants", lambda steps: {0: lambda: len(steps[0]()) * 7.0})
    assert bench._timed(lambda: taken.append(1))() == 7 and len(taken) == 3
    bench.close()


def test_split_points_are_balanced_for_micro_batches_and_mini_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[Any] = []

    def time_layers(model: Any, inputs: Any, *counts: int) -> Any:
        known.append((len(inputs[0]), counts, next(model.parameters()).shape[0]))
        names = ["conv1", "bn1", "layer1.0.conv1", "fc"]
        return SimpleNamespace(profile=SimpleNamespace(layers=[SimpleNamespace(name=name) for name in names]))

    def choose(profile: Any, starts: list[str], ranks: list[int], name: str) -> list[str]:
        known.append((starts, ranks, name))
        return starts[:1]

    monkeypatch.setattr(pipeline, "time_layers", time_layers)
    monkeypatch.setattr(pipeline, "choose_split_points", choose)
    options = parsed("bench pipeline", "--model", "resnet20", "--width", "2", "--batch", "12", "--microbatches", "5")
    assert pipeline._cuts(two_ranks(), options) == (["conv1"],) * 2
    chosen = (["conv1", "layer1.0.conv1", "fc"], [1, 1], "CifarResNet")
    assert known == [(2, (5, 20), 2), chosen, (12, (5, 20), 2), chosen]
    options.microbatches = 50
    pipeline._cuts(two_ranks(), options)
    assert known[4][0] == 1
