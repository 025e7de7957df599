"""Pictures of mesh samples: the first one of a data set, and the result of training."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.jobs.mesh import picture
from distconv.jobs.mesh.picture import MeshExample
from distconv.jobs.mesh.scores import PredictorScore
from tests.jobs.approved.figures import approve_figures


@pytest.mark.filterwarnings("error")
def test_figures_of_samples_and_of_a_training_are_as_approved(monkeypatch: pytest.MonkeyPatch) -> None:
    approve_figures(monkeypatch, picture, "mesh")
    channel = np.arange(12.0).reshape(3, 4) ** 2
    label = (channel > 64).astype(np.uint8)
    probability = (0.5 + 0.2 * np.sin(channel)).astype(np.float32)
    probability[2, 3] = 0.5
    picture.draw_sample("x.png", channel, label, "skew", "shear")
    curve = [(0.1, 1.0), (0.5, 0.6), (1.0, 0.2)]
    scores = [
        PredictorScore("never", ">= 1", 0, 0, {}),
        PredictorScore("skew", ">= 3", 0.2, 0.3, {}, [(0.2, 0.9), (0.9, 0.1)]),
        PredictorScore("net", ">= 0.5", 0.5, 0.4, {}, curve),
    ]
    shown = {"channel": "skew", "threshold": 0.5}
    losses = [(step, 1.0 / (1 + step % 7 + step)) for step in range(3, 70)]
    examples = [
        MeshExample(name, factor * channel, label, probability) for name, factor in (("shear", 1), ("blast", 2))
    ]
    picture.draw("y.png", examples, **shown, losses=losses, verdicts=scores, title="title")
    picture.draw("z.png", examples[:1], **shown, losses=losses[:1], verdicts=scores[:1], title="no curves")
    picture.draw("empty.png", [], **shown, losses=[], verdicts=[], title="nothing")
