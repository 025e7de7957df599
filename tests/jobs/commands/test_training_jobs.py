"""Declarations of the jobs of training commands, as approved; trainers accept the options that are passed to them."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from distconv.errors import DataError
from distconv.jobs.commands import train_mesh, train_pointcloud, train_segmentation, train_sequence
from distconv.jobs.mesh.scores import PredictorScore, Threshold
from distconv.jobs.segmentation.scores import SegmentationScores
from distconv.jobs.sequence.bitstreams import Bitstreams
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import commands_in, option_tests, parsed

COMMANDS = ("classify", "mesh", "pointcloud", "segmentation", "sequence")


def shown(value: object) -> str:
    """Return a value without addresses, or the name of a function or class."""
    return re.sub(" at 0x[0-9a-f]+", "", getattr(value, "__qualname__", None) or repr(value))


def test_the_jobs_of_the_commands_are_as_approved() -> None:
    lines = []
    for command in COMMANDS:
        job = import_module(f"distconv.jobs.commands.train_{command}").JOB
        lines.append(f"{command}: {type(job).__name__}")
        lines += [f"    {field.name}: {shown(getattr(job, field.name))}" for field in fields(job)]
    assert_approved("training-jobs", "\n".join(lines))


@pytest.mark.parametrize("command", COMMANDS)
def test_trainers_accept_the_options_that_are_passed_to_them(command: str) -> None:
    job = import_module(f"distconv.jobs.commands.train_{command}").JOB
    options = parsed(f"train {command}")
    for name in job.trainer_options:
        assert name in inspect.signature(job.trainer).parameters
        assert hasattr(options, name)


@pytest.mark.parametrize("command", ["classify", "mesh", "segmentation"])
def test_samples_without_data_are_refused(command: str) -> None:
    job = import_module(f"distconv.jobs.commands.train_{command}").JOB
    with pytest.raises(DataError, match=r"^--data: missing"):
        job.samples(parsed(f"train {command}"), "COMM")


def test_what_jobs_say_of_their_samples_and_show_of_them() -> None:
    group = [SimpleNamespace(points=[index, 2]) for index in range(3)]
    samples = SimpleNamespace(
        extents=(3, 8, 9), size=(8, 7), channels=4, name="NAME", classes=6, class_names=["a", "b", "c"],
        groups={"test": group}, image=lambda group, sample: f"{group} {sample}",
    )  # fmt: skip
    trainer: Any = SimpleNamespace(samples=samples, loader=SimpleNamespace(points=30))
    lines = []
    for command in COMMANDS:
        job = import_module(f"distconv.jobs.commands.train_{command}").JOB
        lines.append(f"{command}: {job.extents(trainer)}")
        if hasattr(job, "picture"):
            further = job.further_results(SimpleNamespace(method="scan"), samples)
            shown = [list(job.shown_samples(count)) for count in (5, 30)]
            lines.append(f"    {further}, {shown}, {job.class_name(samples, 1)!r}")
            lines.append(f"    {job.example_values(samples, 'test', 2)}")
    assert_approved("training-descriptions", "\n".join(lines))


def test_baselines_of_classifiers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    train, test = (SimpleNamespace(labels=np.array(labels)) for labels in ([1, 1, 0], [0, 0, 1, 0]))
    samples = SimpleNamespace(groups={"train": train, "test": test})
    trainer: Any = SimpleNamespace(samples=samples, comm=MPI.COMM_SELF, epoch=0, settings=SimpleNamespace(seed=8))
    calls: list[Any] = []
    monkeypatch.setattr(train_pointcloud, "perceptron", lambda *given, **named: calls.append((given, named)) or 0.75)
    for epoch in (0, 3):
        trainer.epoch = epoch
        expected = {"majority vote": 0.25, "perceptron on points": 0.75}
        assert train_pointcloud.JOB.baselines(trainer) == expected
        assert calls.pop() == ((train, test), {"epochs": max(epoch, 1), "seed": 8})
        assert capsys.readouterr().out == f"training the baseline: a perceptron, {max(epoch, 1)} epochs\n"
    assert train_sequence.JOB.baselines(trainer) == {"majority vote": 0.25}
    streams = Bitstreams(12, 6)
    trainer.samples.groups = {"train": train, "test": streams}
    monkeypatch.setattr(train_sequence, "counting_accuracy", lambda of: 0.5 if of is streams else 0)
    assert train_sequence.JOB.baselines(trainer)["count of the bits"] == 0.5


def score(name: str, heldout: float) -> PredictorScore:
    return PredictorScore(name, "rule", 0.5, heldout, {"blast": heldout / 2}, [(0.5, 0.5)])


class Kept(list[Any]):
    """Metrics that keep what is written."""

    def write(self, **line: Any) -> None:
        self.append(line)

    def losses(self) -> list[Any]:
        return [(1, 0.5)]

    def lines(self) -> Any:
        return iter(self)


MESH: Any = SimpleNamespace(
    positive_fraction=0.125,
    families={"heldout": ["b", "b", "a", "b", "c", "b"]},
    count=lambda group: 6 * (group == "heldout"),
    file=lambda group: SimpleNamespace(attribute={"train": {"threshold": 0.25}}[group].get),
)


def test_mesh_training_scores_the_network_after_the_baselines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threshold = Threshold(3, True, 0.375)
    histograms = {"train": SimpleNamespace(best_threshold=lambda: threshold), "heldout": "HELDOUT"}
    trainer: Any = SimpleNamespace(
        samples=MESH, scores=histograms.get, grid="GRID", settings=SimpleNamespace(model="unet"), step_count=7
    )
    calls: list[Any] = []

    def returning(name: str, several: bool) -> Any:
        def call(*given: Any) -> Any:
            calls.append((name, *given))
            found = score(name, 0.1 * len(calls))
            return [found] if several else found

        return call

    for name, several in (("constant_answers", 1), ("best_channel", 0), ("extrapolation", 1), ("perceptron", 0)):
        monkeypatch.setattr(train_mesh.baselines, name, returning(name, bool(several)))
    monkeypatch.setattr(train_mesh, "score_predictor", returning("network", False))
    metrics: Any = Kept()
    outcome = train_mesh.JOB.evaluate(SimpleNamespace(baselines=True), trainer, metrics)
    assert calls == [
        ("constant_answers", MESH),
        ("best_channel", MESH),
        ("extrapolation", MESH, 0.25),
        ("perceptron", MESH, "GRID", trainer.settings),
        ("network", "unet", histograms["train"], "HELDOUT", threshold),
    ]
    assert [verdict.name for verdict in outcome.verdicts] == [call[0] for call in calls]
    outcome.show(trainer, metrics)
    assert metrics == [{"step": 7, "evaluation": "heldout", "f1": 0.5, "families": {"blast": 0.25}}]
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(train_mesh, "draw", lambda *given, **named: drawn.update(named, given=given))
    outcome.draw(Path("p"), ["E"], "T", metrics)  # type: ignore[list-item]
    assert drawn.pop("verdicts") == outcome.verdicts
    text = [capsys.readouterr().out, *(f"{key}: {value}" for key, value in (outcome.results | drawn).items())]
    assert_approved("mesh-outcome", "\n".join([*text, outcome.title]))

    monkeypatch.setattr(MESH, "count", lambda group: 0)
    calls.clear()
    nothing = train_mesh.JOB.evaluate(SimpleNamespace(baselines=True), trainer, metrics)
    assert calls == [] and nothing.title == "" and nothing.results["f1"] == [] and nothing.results["gains"] == {}
    nothing.show(trainer, metrics)
    assert len(metrics) == 1 and capsys.readouterr().out == ""
    assert train_mesh.JOB.examples(trainer, nothing) == []


def test_mesh_examples_are_the_first_of_each_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_mesh, "gather", lambda values: values)
    values = torch.arange(6.0)[:, None, None, None].repeat(1, 14, 2, 2) + 10 * torch.arange(14.0)[:, None, None]
    asked = []

    def predictions(group: str) -> Any:
        for at in ((0, 1), (2, 3), (4, 5), (6, 7)):
            asked.append((group, at))
            first = values[list(at)]
            yield SimpleNamespace(samples=at, tensors=(first, first[:, 0] + 0.25)), first[:, 0] + 0.5

    trainer: Any = SimpleNamespace(samples=MESH, predictions=predictions)
    found = train_mesh.JOB.examples(trainer, SimpleNamespace(verdicts=["any"]))
    assert [each.title for each in found] == ["b", "a", "c"]  # not in the order of their names
    assert [each.channel[0, 0] for each in found] == [10 * train_mesh.SHOWN_CHANNEL + sample for sample in (0, 2, 4)]
    assert [each.label[1, 1] for each in found] == [0.25, 2.25, 4.25]
    assert [each.probability[1, 0] for each in found] == [0.5, 2.5, 4.5]
    assert asked == [("heldout", (0, 1)), ("heldout", (2, 3)), ("heldout", (4, 5))]
    monkeypatch.setitem(MESH.families, "heldout", ["b"] * 6)  # of one family, the first three
    found = train_mesh.JOB.examples(trainer, SimpleNamespace(verdicts=["any"]))
    assert [each.label[1, 1] for each in found] == [0.25, 1.25, 2.25]


def test_segmentation_is_scored_on_held_out_samples_when_due(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores, metrics = SegmentationScores(8, 6, (0.5, 1.0), (0.25, 0.75)), Kept()
    samples = SimpleNamespace(groups={"train": 0, "test": 0}, classes=2, ignore=9)
    trainer: Any = SimpleNamespace(samples=samples, epoch=0, step_count=5, evaluate=lambda group: (scores, 0.125))
    job, options = train_segmentation.JOB, SimpleNamespace(evaluate_every=2)
    for trainer.epoch in (1, 2, 3, 4):
        job.after_epoch(options, trainer, metrics)  # type: ignore[arg-type]
    outcomes = [job.evaluate(options, trainer, metrics)]  # type: ignore[arg-type]
    samples.groups = {"train": 0}
    job.after_epoch(options, trainer, metrics)  # type: ignore[arg-type]
    outcomes.append(job.evaluate(options, trainer, metrics))  # type: ignore[arg-type]
    assert [line["evaluation"] for line in metrics] == ["test", "test", "test", "train"]
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(train_segmentation, "draw", lambda *given, **named: drawn.update(named, given=given))
    lines = [str(metrics[0])]
    for outcome in outcomes:
        outcome.show(trainer, metrics)  # type: ignore[arg-type]
        outcome.draw(Path("p"), ["E"], "T", metrics)  # type: ignore[list-item,arg-type]
        lines += [capsys.readouterr().out, str(outcome.results), outcome.title]
    assert drawn == {"given": (Path("p"), ["E"], list(metrics)), "classes": 2, "ignore": 9, "title": "T"}
    assert_approved("segmentation-outcome", "\n".join(lines))


@pytest.mark.parametrize("shape", [(7,), (4, 7), (5, 4, 7)], ids=str)
def test_segmentation_examples_are_the_first_samples_and_of_volumes_the_middle(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(train_segmentation, "gather", lambda values: values)
    monkeypatch.setattr(train_segmentation, "predicted_classes", lambda logits: logits.argmax(1))
    draw, batches = torch.Generator().manual_seed(1), []
    for at in ((0, 1), (2, 3), (4, 5)):
        tensors = [torch.rand(2, channels, *shape, generator=draw) for channels in (3, 1, 4)]
        batches.append((SimpleNamespace(samples=at, tensors=(tensors[0], tensors[1][:, 0])), tensors[2]))
    left = iter(batches)
    trainer: Any = SimpleNamespace(predictions={"test": left}.get)
    found = train_segmentation.JOB.examples(trainer, SimpleNamespace(group="test"))
    assert [each.title for each in found] == ["sample 0", "sample 1", "sample 2"] and len(list(left)) == 1
    cut = {1: lambda map: map[None], 2: lambda map: map, 3: lambda map: map[2]}[len(shape)]
    batch, logits = batches[1]
    wanted = (batch.tensors[0][0, 0], batch.tensors[1][0], logits[0].argmax(0))
    for map, expected in zip((found[2].image, found[2].label, found[2].predicted), wanted, strict=True):
        assert np.array_equal(map, cut(expected).numpy())


def test_options_of_crops_flips_and_weights() -> None:
    assert [train_segmentation.crop(text) for text in ("", "h=4,w=5")] == ["", "h=4,w=5"]
    assert [train_segmentation.mirror(text) for text in ("", "w", "whd")] == ["", "w", "dhw"]
    read = [train_segmentation.weights(text) for text in ("", "balanced", "1,2.5", "0,1")]
    assert read == ["", "balanced", "1.0,2.5", "0.0,1.0"]
    assert train_pointcloud.positive_fraction("1") == 1
    for parse, text in ((train_segmentation.weights, "inf"), (train_segmentation.weights, "2,-1")):
        with pytest.raises(train_segmentation.argparse.ArgumentTypeError, match="neither balanced nor a list"):
            parse(text)


test_options_are_approved, test_documented_defaults_hold = option_tests(*commands_in(__file__))
