"""Every pair of options of a training command: the settings, the place and the run that they come to."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path

import pytest

from distconv.jobs.commands.train_classify import JOB
from distconv.jobs.training.job import train
from distconv.plan import Plan
from tests.jobs.command_lines import Line, pairs, parsed
from tests.jobs.training.observed_training import observed

RUN = ("out", "resume", "overwrite", "track", "every", "replicas", "trace", "device", "init_from")
"""Values of a run. tests/jobs/approved has them, and the settings, without options."""

SETTINGS = (
    [("--width 3", {"width": 3})],
    [("--batch 96", {"batch": 96}), ("--batch 20", {"batch": 20})],
    [("--epochs 7", {"epochs": 7})],
    [("--steps 9", {"steps": 9})],
    [("--optimizer adamw", {"optimizer": "adamw"})],
    [("--optimizer-args '{eps: 0.5}'", {"optimizer_args": {"eps": 0.5}})],
    [("--scheduler StepLR", {"scheduler": "StepLR"})],
    [("--scheduler-args '{gamma: 0.25}'", {"scheduler_args": {"gamma": 0.25}})],
    [("--clip-norm 2.5", {"clip_norm": 2.5})],
    [("--accumulate 4", {"accumulate": 4})],
    [("--ema 0.75", {"ema": 0.75}), ("--ema 0", {"ema": 0.0})],
    [("--lr 0.3", {"lr": 0.3})],
    [("--warm-up 0.6", {"warm_up": 0.6}), ("--warm-up 1", {"warm_up": 1.0})],
    [("--momentum 0.4", {"momentum": 0.4})],
    [("--weight-decay 0.02", {"weight_decay": 0.02})],
    [("--dtype float64", {"dtype": "float64"})],
    [("--precision bf16", {"precision": "bf16"})],
    [
        ("--memory-format channels_last", {"memory_format": "channels_last"}),
        ("--memory-format contiguous", {"memory_format": "contiguous"}),
    ],
    [("--batch-norm spatial", {"batch_norm": "spatial"}), ("--batch-norm local", {"batch_norm": "local"})],
    [("--shard-optimizer", {"shard_optimizer": True})],
    [("--shard-weights all", {"shard_weights": True}), ("--shard-weights n,h", {"shard_weights": "n,h"})],
    [("--seed 11", {"seed": 11})],
    [("--drop-last", {"drop_last": True})],
    [("--out elsewhere", {"out": "elsewhere"})],
    [("--overwrite", {"overwrite": True}), ("--resume", {"resume": "newest"}), ("--resume whole", {"resume": "whole"})],
    [("--track tensorboard", {"track": "tensorboard"})],
    [("--checkpoint-every 0", {"every": 0}), ("--checkpoint-every 13", {"every": 13})],
    [("--check-replicas-every 5", {"replicas": 5})],
    [
        ("--capture on", {"capture": "on"}),
        ("--capture off", {"capture": "off"}),
        ("--capture auto", {"capture": "auto"}),
    ],
    [("--trace 3:5", {"trace": range(3, 5)})],
    [("--device cpu", {"device": "cpu"})],
    [("--init-from w.pt", {"init_from": "w.pt"})],
    [("--grid h=2,w=3", {"grid": {"h": 2, "w": 3}}), ("--plan plan.json", {"plan": "local"})],
)
RANKS = 6


@pytest.mark.parametrize("line", pairs(*SETTINGS), ids=str)
def test_settings_place_and_run_follow_from_each_pair_of_options(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(line.expected)
    plan = Plan({"*": {"h": RANKS}}, RANKS, batch_norm="local")
    found = observed(monkeypatch, "classify", ["--data", "x", *line.words], ranks=RANKS, plan=plan)
    without = observed(monkeypatch, "classify", ["--data", "x"], ranks=RANKS)
    defaults = without["settings"]
    settings = defaults | {name: value for name, value in given.items() if name in defaults}
    if "plan" in given and "batch_norm" not in given:
        settings["batch_norm"] = "local"
    part = settings["batch"] // settings["accumulate"]
    along_n = math.gcd(RANKS, part)
    place = plan if "plan" in given else given.get("grid", {"n": along_n, "h": RANKS // along_n})
    run = {name: given.get(name, without[name]) for name in RUN}
    if run["resume"]:
        run["init_from"] = None
    capture = given.get("capture", "off" if "trace" in given else "auto")
    assert found["settings"] == settings
    assert (found["place"], found["part"], found["capture"]) == (place, part, capture)
    assert {name: found[name] for name in RUN} == run
    assert found["metrics"] == run["out"] and found["trainer"] == "grid"


def test_options_are_printed_as_a_file_that_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", "x", *"--lr 0.25 --grid h=2,w=3 --track tensorboard --evaluate-every 3 --augment flip".split()]
    given = parsed("train classify", *words, "--optimizer-args", "{eps: 0.5}", "--capture", "off")
    assert train(Namespace(**vars(given) | {"print_config": True}), JOB) == 0
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out)
    again = parsed("train classify", "--config", str(tmp_path / "config.yaml"))
    assert vars(again) | {"config": None} == vars(given)
