"""``distconv train sequence``: what it refuses. Its declaration: test_training_jobs.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs.command_lines import assert_refused
from tests.jobs.images.image_files import written
from tests.jobs.sequence.sound_files import write_file


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--grid w=2 --method autograd", "cannot cross ranks among which the steps are split"),
        ("--coefficients 1", "--coefficients 1: too few, since the first coefficient is not used. Use 2 or more"),
        ("--hop-ms 0", "argument --hop-ms: '0' is not a positive number"),
        ("--grid h=2", "sequences have no axis h"),
        ("--data nowhere.h5", "nowhere.h5"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    folder = written(comm, shared_tmp_path, lambda place: write_file(place / "sounds.h5"))
    words = ["train", "sequence", "--data", f"{folder}/sounds.h5", *"--width 3 --batch 4".split()]
    assert_refused(capsys, [*words, "--out", f"{folder}/out", *arguments.split()], message, among_notes=True)
