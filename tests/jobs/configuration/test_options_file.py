"""Options in a file are those of the command line, and what is printed is such a file."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import yaml

from distconv.cli import Parser
from distconv.jobs.configuration.options_file import add_config_arguments, mapping, text_of
from distconv.jobs.training.options import add_training_arguments
from distconv.jobs.training.training import Settings


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="distconv train", allow_abbrev=False)
    made.add_argument("--no-augment", dest="augment", action="store_false")
    add_training_arguments(made, Settings(), out="runs/x")
    return made


def test_a_file_is_what_its_words_are(tmp_path: Path) -> None:
    words = ["--lr", "0.3", "--grid", "n=2,h=2", "--drop-last", "--optimizer", "NAdam", "--no-augment", "--seed", "3"]
    words += ["--optimizer-args", "{betas: [0.8, 0.9]}"]
    expected = parser().parse_args(words)
    assert expected.optimizer_args == {"betas": [0.8, 0.9]} and expected.augment is False
    (tmp_path / "a.yaml").write_text(text_of(expected))
    found = parser().parse_args(["--config", str(tmp_path / "a.yaml")])
    assert vars(found) | {"config": None} == vars(expected)
    later = parser().parse_args(["--lr", "9", "--config", str(tmp_path / "a.yaml"), "--seed", "7"])
    assert (later.lr, later.seed) == (0.3, 7)


def test_options_about_one_call_are_not_printed() -> None:
    printed = yaml.safe_load(text_of(parser().parse_args(["--resume", "--lr", "0.5"])))
    assert printed["lr"] == 0.5 and not {"resume", "overwrite", "config", "print_config"} & set(printed)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("lr: -1", "argument --lr: '-1' is not a number above zero"),
        ("nothing: 1", "there is no option 'nothing' for such a file"),
        ("resume: true", "there is no option 'resume' for such a file"),
        ("drop_last: 3", "drop_last is true or false, not 3"),
        ("- lr", "holds list; write options by their names"),
        ("lr: [", "argument --config: "),
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
    assert mapping("{a: 1, b: [2, x]}") == {"a": 1, "b": [2, "x"]}
    for text in ("3", "{1: 2}", "{a", "[a]"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"is not \{NAME: VALUE"):
            mapping(text)
    made = argparse.ArgumentParser()
    add_config_arguments(made)
    assert made.parse_args(["--print_config"]).print_config
