"""Options in a file are those of the command line, and what is printed is such a file."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from distconv import checkpoint, cli
from distconv.cli import Parser
from distconv.jobs.configuration.options_file import add_config_arguments, format_options, parse_mapping
from distconv.jobs.training.options import add_training_arguments
from distconv.jobs.training.training import TrainingSettings
from tests.jobs.images import image_files
from tests.jobs.mesh import mesh_files
from tests.jobs.pointcloud.cloud_files import write_ours
from tests.jobs.segmentation.label_maps import written
from tests.jobs.sequence.sound_files import write_file


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="distconv train", allow_abbrev=False)
    made.add_argument("--no-augment", dest="augment", action="store_false")
    add_training_arguments(made, TrainingSettings(), out="runs/x")
    return made


def test_a_file_is_what_its_words_are(tmp_path: Path) -> None:
    words = ["--lr", "0.3", "--grid", "n=2,h=2", "--drop-last", "--optimizer", "NAdam", "--no-augment", "--seed", "3"]
    words += ["--optimizer-args", "{betas: [0.8, 0.9]}"]
    expected = parser().parse_args(words)
    assert expected.optimizer_args == {"betas": [0.8, 0.9]} and expected.augment is False
    (tmp_path / "a.yaml").write_text(format_options(expected))
    found = parser().parse_args(["--config", str(tmp_path / "a.yaml")])
    assert vars(found) | {"config": None} == vars(expected)
    later = parser().parse_args(["--lr", "9", "--config", str(tmp_path / "a.yaml"), "--seed", "7"])
    assert (later.lr, later.seed) == (0.3, 7)


TRAINING = [words for words, _ in cli.COMMANDS.items() if words[0] == "train"]
VALUES = {
    "--accumulate": "2", "--batch": "6", "--clip-norm": "0.5", "--devices": "old:2,new:1", "--ema": "0.9",
    "--grid": "n=2,h=2", "--lr": "0.25", "--microbatches": "3", "--optimizer-args": "{betas: [0.8, 0.9]}",
    "--plan": "a b.json", "--ppv": "3,5,7", "--replicas": "2,1", "--scheduler-args": "{gamma: 0.5}", "--trace": "10:13",
    "--weight-decay": "0.125", "--warm-up": "0.5", "--crop": "h=8,w=16", "--class-weights": "1,2", "--mirror": "hw",
}  # fmt: skip
"""A value of options that are not plain strings."""


@pytest.mark.parametrize("words", TRAINING, ids=" ".join)
def test_each_option_is_read_back_as_it_was(words: tuple[str, ...], tmp_path: Path) -> None:
    command = cli.COMMANDS[words]
    made = cli.make_parser(f"distconv {' '.join(words)}", importlib.import_module(command.module))
    tried = 0
    for action in made._actions:
        option = (action.option_strings or [""])[-1]
        if action.dest == "resume" or (option not in VALUES and action.choices is None):
            continue
        value = VALUES.get(option) or str(list(action.choices)[-1])  # type: ignore[arg-type]
        expected = made.parse_args([f"{option}={value}"])
        (tmp_path / "a.yaml").write_text(format_options(expected))
        found = made.parse_args(["--config", str(tmp_path / "a.yaml")])
        assert vars(found) | {"config": None} == vars(expected), option
        tried += 1
    assert tried >= 12


def test_options_of_a_file_exclude_each_other_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("plan: old.json")
    with pytest.raises(SystemExit):
        parser().parse_args(["--config", str(tmp_path / "a.yaml"), "--grid", "n=4"])
    assert "not allowed with argument --grid; one of them is in the options file" in capsys.readouterr().err


def test_options_about_one_call_are_not_printed() -> None:
    printed = yaml.safe_load(format_options(parser().parse_args(["--resume", "--lr", "0.5"])))
    assert printed["lr"] == 0.5 and not {"resume", "overwrite", "config", "print_config"} & set(printed)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("lr: -1", "argument --lr: '-1' is not a positive number"),
        ("nothing: 1", "'nothing' is not an option that a file can set"),
        ("resume: true", "'resume' is not an option that a file can set"),
        ("drop_last: 3", "drop_last must be true or false (found 3)"),
        ("- lr", "not a mapping of options (a list). Write options by name"),
        ("lr: [", "argument --config: "),
        ("lr: 0.1\nlr: 0.2", "line 2: key 'lr' occurs twice"),
        ("!!python/object/apply:os.mkdir [exploded]", "argument --config: "),
    ],
)
def test_what_is_wrong_is_one_line(
    tmp_path: Path, text: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["--config", str(tmp_path / "a.yaml")])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and reason in said and len(said.splitlines()) == 1
    assert not (tmp_path / "exploded").exists()


def test_arguments_are_a_mapping() -> None:
    assert parse_mapping("{a: 1, b: [2, x]}") == {"a": 1, "b": [2, "x"]}
    for text in ("3", "{1: 2}", "{a", "[a]"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"is not a mapping, such as \{NAME: VALUE"):
            parse_mapping(text)
    made = argparse.ArgumentParser()
    add_config_arguments(made)
    assert made.parse_args(["--print_config"]).print_config


def by_rank_0(write: Any) -> Any:
    """A file that one rank writes."""
    return lambda comm, folder: image_files.written(comm, folder, lambda place: write(place / "x.h5")) / "x.h5"


TRAININGS: dict[str, tuple[Any, str, str]] = {
    "mesh": (lambda comm, folder: mesh_files.written(folder / "mesh.h5", comm), "{width: 2, batch: 3}", "h"),
    "classify": (image_files.written, "{model: lenet5, batch: 8, augment: 'crop,flip'}", "h"),
    "sequence": (by_rank_0(write_file), "{width: 3, batch: 4}", "w"),
    "pointcloud": (by_rank_0(write_ours), "{width: 2, batch: 2, resolution: 16, points: 30, keep: 0.8}", "d"),
    "segmentation": (
        lambda comm, folder: written(folder / "maps.h5", comm),
        "{model: 'tests.jobs.segmentation.label_maps:net', width: 2, batch: 2, accumulate: 2, ignore_label: 255, "
        "crop: 'h=8,w=8', mirror: hw, class_weights: balanced}",
        "h",
    ),
}
OPTIONS = """
optimizer: AdamW
optimizer_args: {betas: [0.9, 0.95], weight_decay: 0.02}
scheduler: OneCycleLR
scheduler_args: {pct_start: 0.5}
lr: 0.01
clip_norm: 1.0
ema: 0.9
steps: 3
seed: 5
"""


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.parametrize("task", TRAININGS)
def test_a_run_from_its_saved_file_is_the_same_bit_for_bit(
    comm: Any, shared_tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # pictures take longer than the steps
    data, own, axis = TRAININGS[task]
    path = data(comm, shared_tmp_path)
    if comm.rank == 0:
        text = OPTIONS + yaml.safe_dump(yaml.safe_load(own)) + f"data: {path}\n"
        (shared_tmp_path / "a.yaml").write_text(text)
    comm.Barrier()
    first, again = shared_tmp_path / "first", shared_tmp_path / "again"
    at = ["train", task, "--config", str(shared_tmp_path / "a.yaml"), "--grid", f"{axis}={comm.size}"]
    assert cli.main([*at, "--out", str(first)]) == 0
    assert cli.main(["train", task, "--config", str(first / "config.yaml"), "--out", str(again)]) == 0
    comm.Barrier()
    steps = [
        [line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "lr" in line]
        for out in (first, again)
    ]
    numbers = [[(line["step"], line["loss"], line["lr"]) for line in lines] for lines in steps]
    assert len(numbers[0]) == 3 and numbers[0] == numbers[1]
    one, other = (checkpoint.load(out / "checkpoints" / "step-000003", comm).tensors for out in (first, again))
    assert one.keys() == other.keys() and any(name.startswith("average/") for name in one)
    assert all(torch.equal(one[name], other[name]) for name in one)
