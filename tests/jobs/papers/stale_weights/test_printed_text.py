"""Runs that the options of ``distconv reproduce stale-weights`` ask for, and what is said and drawn of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distconv.jobs.papers.stale_weights import command, picture
from distconv.jobs.papers.stale_weights.recipes import RECIPES
from distconv.jobs.papers.stale_weights.table import VariantRow, table
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import Line, pairs, parsed

SAMPLES: Any = SimpleNamespace(
    extents=(3, 64, 64),
    groups={"train": SimpleNamespace(labels=range(50)), "test": SimpleNamespace(labels=range(20))},
)


@pytest.mark.parametrize(
    "line",
    pairs(
        [("--variants 1 nonpipelined", {"variants": ["1", "nonpipelined"]})],
        [("--seeds 4 2", {"seeds": [4, 2]})],
        [("--iterations 60", {"iterations": 60})],
        [("--schedule 1000000", {"schedule": 1_000_000})],
        [("--batch 8", {"batch": 8})],
        [("--width 5", {"width": 5})],
    ),
    ids=str,
)
@pytest.mark.parametrize("network", RECIPES)
def test_runs_are_those_of_the_options_or_else_of_the_recipe(network: str, line: Line, tmp_path: Path) -> None:
    recipe, of = RECIPES[network], dict(line.expected)
    runs = command.runs_of(parsed("reproduce stale-weights", network, "--data", str(tmp_path), *line.words), SAMPLES)
    iterations = of.get("iterations", recipe.iterations)
    expected = [
        command.TrainingRun(
            network,
            of.get("width"),
            str(command.TrainingVariant.parse(variant)),
            seed,
            iterations,
            of.get("schedule", iterations),
            of.get("batch", recipe.batch),
            tmp_path.name,
            train=50,
            test=20,
        )
        for seed in of.get("seeds", [0, 1, 2])
        for variant in of.get("variants", recipe.variants)
    ]
    assert runs == expected


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


def test_curves_and_accuracies_are_drawn_in_per_cent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(picture, "write_picture", lambda path, figure, dpi: figures.append(figure))
    picture.draw(tmp_path / "x.png", ROWS, "a title")
    curves, shares = figures[0].axes
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in curves.lines}
    assert drawn["nonpipelined"] == ([3, 6], pytest.approx([50, 90]))
    assert drawn["1"] == ([3, 6], pytest.approx([30, 80]))
    assert [text.get_text() for text in curves.get_legend().get_texts()] == ["nonpipelined", "1"]
    points = [container[0].get_xydata()[0] for container in shares.containers]
    assert points == [pytest.approx((0, 91)), pytest.approx((25, 50))]
    (bar,) = shares.containers[1][2]
    assert bar.get_segments()[0].tolist() == [pytest.approx((25, 50 - 37.5)), pytest.approx((25, 50 + 37.5))]
    assert (
        [line.get_color() for line in curves.lines]
        == ["C0", "C1"]
        == [each[0].get_color() for each in shares.containers]
    )
    assert (curves.get_xlabel(), shares.get_xlabel()) == ("iteration", "stale weights (%)")
    assert curves.get_ylabel() == "test accuracy (%), mean over seeds"
    assert shares.get_ylabel() == "test accuracy (%), mean and standard error"
    assert figures[0].get_suptitle() == "a title"
