"""``distconv train sequence``: what it writes, how it resumes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import wavfile

import distconv as dc
from distconv import cli
from distconv.jobs.sequence import samples
from distconv.jobs.training.picture import ResultFigure
from tests.jobs.command_lines import assert_refused
from tests.jobs.commands.test_train_classify import assert_of_two_epochs, lines_of
from tests.jobs.images.image_files import written
from tests.jobs.sequence.sound_files import write_file, write_folder

GRIDS = {1: "n=1", 2: "w=2"}


def command(comm: Any, folder: Path, *more: str) -> list[str]:
    small = "--width 3 --batch 4".split()
    out = ["--out", str(folder / "out"), "--grid", GRIDS[comm.size]]
    return ["train", "sequence", "--data", str(folder / "sounds.h5"), *small, *out, *more]


def with_sounds(comm: Any, folder: Path) -> Path:
    return written(comm, folder, lambda place: write_file(place / "sounds.h5"))


@pytest.mark.long
@pytest.mark.ranks(1, 2)
def test_it_writes_metrics_a_summary_checkpoints_and_a_picture_and_resumes_by_another_method(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_sounds(comm, shared_tmp_path)
    exact = ["--epochs", "2", "--dtype", "float64"]
    assert cli.main(command(comm, folder, *exact, "--checkpoint-every", "4", "--method", "blelloch")) == 0
    comm.Barrier()
    lines = lines_of(folder)
    assert_of_two_epochs(lines)
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["test_accuracy"] == lines[-1]["accuracy"] == lines[-1]["correct"] / 3
    assert summary["baselines"] == {"majority vote": pytest.approx(1 / 3)}
    assert (summary["method"], summary["classes"]) == ("blelloch", ["0", "1", "2"])
    assert sorted(p.name for p in (folder / "out" / "checkpoints").glob("step-*")) == ["step-000004", "step-000006"]
    assert (folder / "out" / "result.png").read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    for text in ("on 9 samples of 12 values a step, ", "test accuracy: ", "of a majority vote: 33.33 %"):
        assert (text in printed) == (comm.rank == 0)
    monkeypatch.setattr(ResultFigure, "draw", lambda *_: None)
    comm.Barrier()  # the other ranks have looked for this checkpoint
    if comm.rank == 0:
        (folder / "out" / "checkpoints" / "step-000006").rename(folder / "away")
    comm.Barrier()
    again = command(comm, folder, *exact, "--resume", "--checkpoint-every", "0", "--method", "sequential")
    assert cli.main(again) == 0
    comm.Barrier()
    losses = [[line["loss"] for line in each] for each in (lines, lines_of(folder))]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    capsys.readouterr()
    assert_refused(capsys, [*again, "--hop-ms", "5"], "different settings: hop_ms was 10.0 and is 5.0")


def test_a_folder_without_held_out_sounds_is_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResultFigure, "draw", lambda *_: None)
    folder = write_folder(tmp_path / "sounds", test=False)
    assert cli.main(["train", "sequence", "--data", str(folder), "--steps", "2", "--out", str(tmp_path / "out")]) == 0
    assert "no held-out sequences to test on" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["classes"] == ["tone0", "tone1", "tone2"]


def test_stereo_sounds_are_trained_on_by_channel_in_frames_of_any_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResultFigure, "draw", lambda *_: None)
    folder = write_folder(tmp_path / "sounds")
    for file in folder.glob("t*/*/*.wav"):
        rate, sound = wavfile.read(file)
        wavfile.write(file, rate, np.stack([sound, sound[::-1]], 1))
    of_set_s = ["--stereo", "--coefficients", "20", "--window-ms", "92.88", "--hop-ms", "11.61"]
    arguments = ["train", "sequence", "--data", str(folder), "--steps", "1", "--out", str(tmp_path / "out")]
    assert cli.main([*arguments, *of_set_s]) == 0
    assert "samples of 38 values a step" in capsys.readouterr().out


def test_without_data_it_trains_on_bitstreams(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "STREAMS", {"train": (20, 0), "test": (10, 1)})
    arguments = ["train", "sequence", "--model", "rnn", "--steps", "1", "--length", "30", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "on 20 samples of 1 values a step, bitstreams, batch 16, 1 steps" in printed
    assert "test accuracy of a count of the bits: " in printed


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "fast"], "argument --method: invalid choice: 'fast'"),
        (["--method", "autograd"], "cannot cross ranks among which the steps are split"),
        (["--coefficients", "1"], "--coefficients 1: too few, since the first coefficient is not used. Use 2 or more"),
        (["--hop-ms", "0"], "argument --hop-ms: '0' is not a positive number"),
        (["--window-ms", "0"], "argument --window-ms: '0' is not a positive number"),
        (["--model", "lstm"], "argument --model: invalid choice: 'lstm'"),
        (["--grid", "h=2"], "sequences have no axis h"),
        (["--data", "nowhere.h5"], "nowhere.h5"),
        (["--resume"], "--resume: no finished checkpoint in"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_code_2(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    folder = with_sounds(comm, shared_tmp_path)
    assert_refused(capsys, command(comm, folder, *arguments), message, among_notes=True)


def test_a_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dc.Plan({"*": {"n": 1}}, 1).save(tmp_path / "plan.json")
    text = "--plan: a recurrent network has the same grid for all layers"
    assert_refused(capsys, ["train", "sequence", "--plan", str(tmp_path / "plan.json")], text)
