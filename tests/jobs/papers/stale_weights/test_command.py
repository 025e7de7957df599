"""``distconv reproduce stale-weights``: runs, their results, table and figure, and bad input."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch.nn import functional as F

from distconv import cli
from distconv.jobs.images.samples import ImageSamples
from distconv.jobs.papers.stale_weights import command, picture
from distconv.jobs.papers.stale_weights.recipes import RECIPES, TrainingVariant, VariantError
from distconv.jobs.papers.stale_weights.table import FinishedRuns, VariantRow, rows_of, table
from distconv.jobs.papers.stale_weights.training import TrainingRun, batches, build, held_out, train
from distconv.pipeline import SerialPipeline, split
from tests.jobs.approved import assert_approved
from tests.jobs.approved.figures import approve_figures
from tests.jobs.command_lines import assert_refused, commands_in, option_tests, parsed
from tests.jobs.images import image_files

TINY = TrainingRun("lenet5", None, "nonpipelined", 0, 6, 6, 8, "tiny", 40, 21)
COMMAND = ["reproduce", "stale-weights"]
ALL = ["nonpipelined", "1", "1,2,3,4", "hybrid:2", "stash:1,2"]


@pytest.fixture
def folder(tmp_path):
    """A small MNIST."""
    image_files.write_mnist(tmp_path)
    return tmp_path


@pytest.fixture
def samples(folder):
    opened = ImageSamples(folder, MPI.COMM_SELF)
    yield opened
    opened.close()


def arguments(folder, *more):
    data = ["--data", str(folder), "--results", f"{folder}/r.jsonl"]
    return [*COMMAND, "lenet5", *data, "--iterations", "4", "--batch", "8", *more]


@pytest.mark.parametrize("schedule", [6, 20])
def test_a_nonpipelined_run_is_plain_training_with_sgd_and_the_falling_rate(samples, schedule):
    test = held_out(samples)
    found = train(replace(TINY, schedule=schedule), samples, test, 2)
    model, data, recipe = build(TINY, samples), batches(TINY, samples), RECIPES["lenet5"]
    sgd = torch.optim.SGD(model.parameters(), recipe.rate, 0.9, weight_decay=recipe.weight_decay)
    losses = []
    for iteration in range(TINY.iterations):
        images, labels = next(data)
        sgd.param_groups[0]["lr"] = recipe.rate * (1 + 3 * iteration / schedule) ** -0.75
        sgd.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    data.close()
    assert [at for at, _, _ in found["curve"]] == [3, 6]
    assert [loss for _, _, loss in found["curve"]] == pytest.approx(
        [sum(losses[:3]) / 3, sum(losses[3:]) / 3], abs=1e-6
    )
    model.eval()
    correct = torch.cat([model(images).argmax(1) == labels for images, labels in test])
    assert found["accuracy"] == pytest.approx(correct.double().mean().item(), abs=1e-12)


def test_a_hybrid_is_pipelined_for_two_thirds_of_its_iterations(samples, monkeypatch):
    made = []
    switch = SerialPipeline.switch
    monkeypatch.setattr(
        SerialPipeline, "switch", lambda self, name: (made.append(len(self.losses)), switch(self, name))
    )
    found = train(replace(TINY, variant="hybrid:1,2"), samples, held_out(samples), 1)
    # Three stages hold 5 mini-batches in flight: of the 4 begun none is finished when it switches.
    assert made == [0] and found["curve"][0][0] == 6 and found["stale_share"] == pytest.approx(2572 / 61706)


@pytest.mark.parametrize(("text", "weights"), [("stash:1,2", "stash"), ("1,2", "newest")])
def test_backward_passes_have_the_weights_that_the_variant_says(samples, text, weights):
    """Its last losses are those of the serial pipeline, whose numbers tests/pipeline/reference shows."""
    run = replace(TINY, variant=text, iterations=12)
    found = train(run, samples, held_out(samples), 1)
    stages, recipe = split(build(run, samples), (1, 2)), RECIPES["lenet5"]
    serial = SerialPipeline(
        stages,
        F.cross_entropy,
        lambda params: torch.optim.SGD(params, recipe.rate, 0.9, weight_decay=recipe.weight_decay),
        "stale",
        weights=weights,
    )
    with closing(batches(run, samples)) as data:
        for iteration in range(12):
            for optimizer in serial.optimizers:
                optimizer.param_groups[0]["lr"] = recipe.rate * (1 + 3 * iteration / TINY.schedule) ** -0.75
            serial.step(*next(data))
    serial.drain()
    losses = [loss for _, loss in serial.losses]
    assert found["curve"][0][2] == pytest.approx(sum(losses) / 12, rel=1e-6)


def test_a_run_that_diverges_ends_there_and_says_so(samples):
    found = train(replace(TINY, variant="1@1e30", iterations=40), samples, held_out(samples), 2)
    assert 0 < found["diverged_at"] < 40


def test_an_experiment_that_was_stopped_makes_only_the_runs_that_are_missing(folder, capsys):
    assert cli.main(arguments(folder, "--seeds", "0", "--variants", *ALL)) == 0
    first = (folder / "r.jsonl").read_text()
    (folder / "r.jsonl").write_text(first[: first.rindex('"seconds"')])  # killed while it wrote the last line
    assert cli.main(arguments(folder, "--seeds", "0", "--variants", *ALL)) == 0
    out = capsys.readouterr().out
    assert "5 of 5 runs are to be made" in out and "1 of 5 runs are to be made" in out
    lines = (folder / "r.jsonl").read_text().splitlines()
    assert len(lines) == 6
    again, before = json.loads(lines[5]), json.loads(first.splitlines()[4])
    assert again["run"] == before["run"] and again["result"]["curve"] == before["result"]["curve"]
    assert (folder / "r.png").stat().st_size > 0


def test_the_drop_is_taken_seed_by_seed():
    def result(accuracy):
        return {"accuracy": accuracy, "stale_share": 0.25, "diverged_at": None, "curve": []}

    baseline = {0: result(0.9), 1: result(0.8), 2: result(0.7)}
    row = VariantRow("7", {0: result(0.88), 1: result(0.78)}, baseline)
    assert row.mean == pytest.approx(0.83) and row.error == pytest.approx(0.05)
    assert row.drops == pytest.approx([0.02, 0.02])
    assert table([row]).splitlines()[-1] == "| 7 | 25.00 | 83.00 +- 5.00 (n=2) | 2.00 +- 0.00 | 0 |"


def test_results_are_found_by_all_that_their_numbers_depend_on(tmp_path):
    results = FinishedRuns(tmp_path / "of" / "runs.jsonl")
    results.add(TINY, {"accuracy": 0.5})
    assert FinishedRuns(results.path).of(TINY) == {"accuracy": 0.5}
    assert results.of(replace(TINY, schedule=20)) is None
    assert results.of(replace(TINY, iterations=7)) is None and results.of(replace(TINY, width=3)) is None
    assert [row.variant for row in rows_of(results, [TINY, replace(TINY, seed=1)])] == ["nonpipelined"]


@pytest.mark.parametrize(
    "text",
    ["nonpipelined", "nonpipelined@0.01", "7", "7,13,19@0.5", "hybrid:7,13", "stash:7,13@0.1", "7@1e-05", "7@1e+30"],
)
def test_a_variant_is_written_as_it_is_read(text):
    assert str(TrainingVariant.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "hybrid", "hybrid:nonpipelined", "stash", "stash:hybrid:7", "7,", "7@", "7@-1", "seven"]
)
def test_what_is_no_variant_is_refused(text):
    with pytest.raises(VariantError, match=r"is not a valid variant\. Use nonpipelined"):
        TrainingVariant.parse(text)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--variants", "1;2"], "--variants: '1;2' is not a valid variant"),
        (["--variants", "5"], "distconv reproduce stale-weights: "),
        (["--batch", "41"], "no batch of 41 can be made of the 40 samples"),
        (["--data", "/nowhere"], "/nowhere"),
        (["--iterations", "6", "--schedule", "5"], "--schedule 5: fewer than the 6 training iterations"),
        (["--variants", "7@0"], "--variants: '7@0' is not a valid variant"),
    ],
)
def test_bad_input_is_one_line(folder, capsys, more, message):
    assert_refused(capsys, arguments(folder, "--seeds", "0", *more), message)


def test_images_that_are_too_small_are_refused(folder, capsys):
    text = "images of (1, 28, 28), but vgg16_bn needs (32, 32) or more"
    assert_refused(capsys, [*COMMAND, "vgg16_bn", *arguments(folder)[3:]], text)


def test_data_without_test_images_are_refused(tmp_path, capsys):
    image_files.write_hdf5(tmp_path / "train.h5", {"": 20})
    assert_refused(capsys, arguments(tmp_path), ": no test images")


test_options_are_approved, test_documented_defaults_hold = option_tests(*commands_in(__file__))


SAMPLES: Any = SimpleNamespace(
    extents=(3, 64, 64),
    groups={"train": SimpleNamespace(labels=range(50)), "test": SimpleNamespace(labels=range(20))},
)


def test_runs_are_those_of_the_options_or_else_of_the_recipe() -> None:
    settings = "--variants 1 nonpipelined --seeds 4 2 --iterations 60 --schedule 1000000 --batch 8 --width 5"
    lines = []
    for network in RECIPES:
        for words in ("", settings):
            runs = command.runs_of(parsed("reproduce stale-weights", network, "--data", "d/e", *words.split()), SAMPLES)
            lines.append(f"{runs[0]}; {', '.join(f'{run.variant} {run.seed}' for run in runs)}")
            assert len({replace(run, variant="", seed=0) for run in runs}) == 1
    assert_approved("stale-weights-runs", "\n".join(lines))


def test_settings_and_progress_are_printed_as_approved(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for network in RECIPES:
        for more in ([], ["--width", "8", "--batch", "4", "--iterations", "30", "--schedule", "90"]):
            options = parsed("reproduce stale-weights", network, "--data", "/mnt/pictures", *more)
            print(command._settings(command.runs_of(options, SAMPLES)[0]))
    monkeypatch.setattr(command, "split", lambda model, placement: None)
    monkeypatch.setattr(command, "build", lambda run, samples: None)
    monkeypatch.setattr(command, "held_out", lambda samples: "held out")
    results = iter([RESULTS["1"][0], RESULTS["1"][1], RESULTS["nonpipelined"][0]])
    monkeypatch.setattr(command, "train", lambda run, samples, test, evaluations: next(results))
    options = parsed("reproduce stale-weights", *"lenet5 --data x --seeds 0 --variants 1 2 nonpipelined".split())
    runs = command.runs_of(options, SAMPLES)
    command.make(runs, command.FinishedRuns(tmp_path / "runs.jsonl"), SAMPLES, 2)
    command.make(runs, command.FinishedRuns(tmp_path / "runs.jsonl"), SAMPLES, 2)
    print(table(ROWS))
    assert_approved("stale-weights", capsys.readouterr().out)


def result(accuracy: float, share: float, diverged_at: int | None, curve: list[Any]) -> dict[str, Any]:
    return {
        "accuracy": accuracy,
        "stale_share": share,
        "diverged_at": diverged_at,
        "curve": curve,
        "seconds": 600.0 * (1 + accuracy),
    }


RESULTS = {
    "nonpipelined": {0: result(0.91, 0.0, None, [(3, 0.5, 1.0), (6, 0.9, 0.5)])},
    "1": {
        0: result(0.875, 0.25, None, [(3, 0.4, 1.0), (6, 0.8, 0.5)]),
        1: result(0.125, 0.25, 5, [(3, 0.2, 1.0)]),
    },
}
ROWS = [VariantRow(variant, results, RESULTS["nonpipelined"]) for variant, results in RESULTS.items()]


def test_the_figure_of_curves_and_accuracies_is_as_approved(monkeypatch: pytest.MonkeyPatch) -> None:
    approve_figures(monkeypatch, picture, "stale-weights")
    picture.draw(Path("x.png"), ROWS, "a title")
