"""``distconv reproduce stale-weights``: what a run does, how the experiment goes on, its table, what it refuses."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from distconv import cli
from distconv.jobs.images.samples import ImageSamples
from distconv.jobs.papers.stale_weights.recipes import RECIPES, TrainingVariant, VariantError
from distconv.jobs.papers.stale_weights.table import FinishedRuns, VariantRow, rows_of, table
from distconv.jobs.papers.stale_weights.training import TrainingRun, batches, build, held_out, train
from distconv.pipeline import SerialPipeline, split
from tests.jobs.command_lines import assert_refused
from tests.jobs.images import image_files

TINY = TrainingRun("lenet5", None, "nonpipelined", 0, 6, 6, 8, "tiny", 40, 21)
COMMAND = ["reproduce", "stale-weights"]
ALL = ["nonpipelined", "1", "1,2,3,4", "hybrid:2", "stash:1,2"]


@pytest.fixture
def folder(tmp_path, comm):
    """A small MNIST. The job is one process; ``comm`` only says that this test needs MPI."""
    image_files.write_mnist(tmp_path)
    return tmp_path


@pytest.fixture
def samples(folder, comm):
    opened = ImageSamples(folder, comm)
    yield opened
    opened.close()


def arguments(folder, *more):
    data = ["--data", str(folder), "--results", f"{folder}/r.jsonl"]
    return [*COMMAND, "lenet5", *data, "--iterations", "4", "--batch", "8", *more]


on_one_rank = pytest.mark.ranks(1)


@on_one_rank
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


@on_one_rank
def test_a_hybrid_is_pipelined_for_two_thirds_of_its_iterations(samples, monkeypatch):
    made = []
    switch = SerialPipeline.switch
    monkeypatch.setattr(
        SerialPipeline, "switch", lambda self, name: (made.append(len(self.losses)), switch(self, name))
    )
    found = train(replace(TINY, variant="hybrid:1,2"), samples, held_out(samples), 1)
    # Three stages hold 5 mini-batches in flight: of the 4 begun none is finished when it switches.
    assert made == [0] and found["curve"][0][0] == 6 and found["stale_share"] == pytest.approx(2572 / 61706)


@on_one_rank
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


@pytest.mark.long
@on_one_rank
def test_every_variant_of_every_recipe_trains(samples, tmp_path_factory, comm):
    cifar = tmp_path_factory.mktemp("cifar")
    image_files.write_cifar(cifar)
    for name, recipe in RECIPES.items():
        data = samples if name == "lenet5" else ImageSamples(cifar, comm)
        test = held_out(data)
        for variant in recipe.variants:
            found = train(TrainingRun(name, 8, variant, 0, 3, 3, 8, "tiny", 0, 0), data, test, 1)
            assert found["diverged_at"] is None and 0 <= found["accuracy"] <= 1 and len(found["curve"]) == 1


@on_one_rank
def test_a_run_that_diverges_ends_there_and_says_so(samples):
    found = train(replace(TINY, variant="1@1e30", iterations=40), samples, held_out(samples), 2)
    assert 0 < found["diverged_at"] < 40


@on_one_rank
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


@on_one_rank
def test_other_settings_are_other_runs(folder, capsys):
    assert cli.main(arguments(folder, "--seeds", "0", "--variants", "1")) == 0
    assert cli.main(arguments(folder, "--seeds", "1", "--variants", "1", "nonpipelined")) == 0
    assert "2 of 2 runs are to be made" in capsys.readouterr().out


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


@on_one_rank
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


@on_one_rank
def test_images_that_are_too_small_are_refused(folder, capsys):
    text = "images of (1, 28, 28), but vgg16_bn needs (32, 32) or more"
    assert_refused(capsys, [*COMMAND, "vgg16_bn", *arguments(folder)[3:]], text)


@on_one_rank
def test_data_without_test_images_are_refused(tmp_path, comm, capsys):
    image_files.write_hdf5(tmp_path / "train.h5", {"": 20})
    assert_refused(capsys, arguments(tmp_path), ": no test images")
