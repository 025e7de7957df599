"""Options of each training command that the others do not have: how its samples are opened, and its own settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.jobs.command_lines import Line, pairs
from tests.jobs.training.observed_training import observed

Options = Sequence[Sequence[tuple[str, Mapping[str, Any]]]]

READERS = [("--readers 3", {"samples.readers": 3})]
TEST_DATA = [("--test-data y.h5", {"samples.test_path": "y.h5"})]
NAMES = (
    [("--image-name a/b", {"image": "a/b"})],
    [("--label-name c", {"label": "c"})],
)
EVERY = [("--evaluate-every 2", {"evaluated": [2, 4, 6]}), ("--evaluate-every 4", {"evaluated": [4]})]

TASKS: dict[str, tuple[dict[str, Any], Options]] = {
    "classify": (
        {
            "samples.readers": 1,
            "samples.test_path": None,
            "samples.classes": None,
            "samples.limit": None,
            "model": "lenet5",
            "augment": "",
            "evaluated": [1, 2, 3, 4, 5, 6],
        },
        (
            READERS,
            TEST_DATA,
            *NAMES,
            [("--classes 7", {"samples.classes": 7})],
            [("--max-train-samples 50", {"samples.limit": 50})],
            [("--model alexnet", {"model": "alexnet"})],
            [("--augment", {"augment": "crop,flip"}), ("--augment flip", {"augment": "flip"})],
            EVERY,
        ),
    ),
    "mesh": (
        {
            "samples.readers": 1,
            "samples.extrapolated": False,
            "model": "unet",
            "augment": True,
            "lr": 4e-3,
            "warm_up": 0.3,
            "weight_decay": 1e-2,
            "evaluated": [],
        },
        (
            READERS,
            [("--baselines", {"samples.extrapolated": True})],
            [("--no-augment", {"augment": False})],
            [("--model mesh1k", {"model": "mesh1k"})],
            [("--lr 0.5", {"lr": 0.5})],
        ),
    ),
    "segmentation": (
        {
            "samples.readers": 1,
            "samples.test_path": None,
            "samples.classes": None,
            "samples.ignore": None,
            "ignore_label": None,
            "model": "",
            "loss": "cross-entropy",
            "class_weights": "",
            "crop": "",
            "mirror": "",
            "evaluated": [1, 2, 3, 4, 5, 6],
        },
        (
            READERS,
            TEST_DATA,
            *NAMES,
            [("--classes 7", {"samples.classes": 7})],
            [("--ignore-label 255", {"samples.ignore": 255, "ignore_label": 255})],
            [("--model unet3d", {"model": "unet3d"})],
            [("--loss cross-entropy+dice", {"loss": "cross-entropy+dice"})],
            [
                ("--class-weights 1,2.5", {"class_weights": "1.0,2.5"}),
                ("--class-weights balanced", {"class_weights": "balanced"}),
            ],
            [("--crop w=8,h=6", {"crop": "w=8,h=6"})],
            [("--mirror wd", {"mirror": "dw"})],
            EVERY,
        ),
    ),
    "pointcloud": (
        {"model": "resnet", "width": 8, "resolution": 32, "points": 1024, "keep": 1.0, "varied": False, "batch": 16},
        (
            [("--model vgg16_bn", {"model": "vgg16_bn"})],
            [("--width 4", {"width": 4})],
            [("--resolution 50", {"resolution": 50})],
            [("--points 300", {"points": 300})],
            [("--keep 0.5", {"keep": 0.5})],
            [("--varied", {"varied": True})],
            [("--batch 6", {"batch": 6})],
        ),
    ),
    "sequence": (
        {
            "samples.length": 200,
            "samples.coefficients": 13,
            "samples.window_ms": 25.0,
            "samples.hop_ms": 10.0,
            "samples.stereo": False,
            "model": "gru",
            "length": 200,
            "coefficients": 13,
            "window_ms": 25.0,
            "hop_ms": 10.0,
            "stereo": False,
            "method": "auto",
        },
        (
            [("--model rnn", {"model": "rnn"})],
            [("--method blelloch", {"method": "blelloch"})],
            [("--length 99", {"length": 99, "samples.length": 99})],
            [("--coefficients 5", {"coefficients": 5, "samples.coefficients": 5})],
            [("--window-ms 30", {"window_ms": 30.0, "samples.window_ms": 30.0})],
            [("--hop-ms 7", {"hop_ms": 7.0, "samples.hop_ms": 7.0})],
            [("--stereo", {"stereo": True, "samples.stereo": True})],
        ),
    ),
}


@pytest.mark.parametrize(
    ("task", "line"), [(task, line) for task, (_, options) in TASKS.items() for line in pairs(*options)], ids=str
)
def test_samples_and_settings_follow_from_each_pair_of_options(
    task: str, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = TASKS[task][0] | dict(line.expected)
    found = observed(monkeypatch, task, ["--data", "x.h5", *line.words], ranks=2)
    assert found["data"] == "x.h5"
    if "samples.names" in found:
        assert found["samples.names"] == (expected.pop("image", "image"), expected.pop("label", "label"))
    values = {**found, **found["settings"], **found["more"]}
    values = {name: str(value) if name == "samples.test_path" and value else value for name, value in values.items()}
    assert {name: values[name] for name in expected} == expected
