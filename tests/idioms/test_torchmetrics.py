"""torchmetrics with DistTensors, with gathered outputs and with blocks: the results of one process."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, normal
from tests.layers.compare import whole

pytest.importorskip("torchmetrics", reason="needs the package torchmetrics")
pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.usefixtures("fallback")]

CLASSES = 4
SCORES = normal(3, CLASSES, 5, 6, seed=1).softmax(1)
LABELS = normal(3, 5, 6, seed=2).mul(9).long().remainder(CLASSES)
BINARY, TRUTH = normal(3, 5, 6, seed=3).sigmoid(), normal(3, 5, 6, seed=4).gt(0).long()
X, Y = normal(3, 2, 5, 6, seed=5), normal(3, 2, 5, 6, seed=6)

COUNTS = {
    "accuracy": ("classification.MulticlassAccuracy", (CLASSES,), {}, SCORES, LABELS),
    "accuracy of all": ("classification.MulticlassAccuracy", (CLASSES,), {"average": "micro"}, SCORES, LABELS),
    "ignored labels": ("classification.MulticlassAccuracy", (CLASSES,), {"ignore_index": 1}, SCORES, LABELS),
    "confusion matrix": ("classification.MulticlassConfusionMatrix", (CLASSES,), {}, SCORES, LABELS),
    "Jaccard": ("classification.MulticlassJaccardIndex", (CLASSES,), {}, SCORES, LABELS),
    "F1": ("classification.MulticlassF1Score", (CLASSES,), {"average": None}, SCORES, LABELS),
    "F1 of two classes": ("classification.BinaryF1Score", (), {}, BINARY, TRUTH),
    "AUROC at thresholds": ("classification.BinaryAUROC", (), {"thresholds": 11}, BINARY, TRUTH),
    "mean squared error": ("MeanSquaredError", (), {}, X, Y),
    "mean absolute error": ("MeanAbsoluteError", (), {}, X, Y),
}
"""Metrics whose states are sums over elements: exact from blocks, too."""

OTHERS = {
    "AUROC": ("classification.BinaryAUROC", (), {}, BINARY, TRUTH),
    "Dice of each sample": ("segmentation.DiceScore", (CLASSES,), {"input_format": "index"}, SCORES.argmax(1), LABELS),
    "IoU of each sample": ("segmentation.MeanIoU", (CLASSES,), {"input_format": "index"}, SCORES.argmax(1), LABELS),
    "R2": ("R2Score", (), {}, X.flatten(), Y.flatten()),
    "correlation": ("PearsonCorrCoef", (), {}, X.flatten(), Y.flatten()),
    "noise ratio": ("image.PeakSignalNoiseRatio", (), {"data_range": 1.0}, X, Y),
    "similarity": ("image.StructuralSimilarityIndexMeasure", (), {"data_range": 1.0, "kernel_size": 3, "sigma": 0.5},
                   X, Y),
    "calibration": ("classification.MulticlassCalibrationError", (CLASSES,), {}, SCORES, LABELS),
}  # fmt: skip


def made(kind: str, arguments: Any, options: Any) -> Any:
    module, _, name = f"torchmetrics.{kind}".rpartition(".")
    return getattr(importlib.import_module(module), name)(*arguments, **options).set_dtype(torch.float64)


def updated(metric: Any, *operands: Any) -> Any:
    """Two mini-batches, the second of them one sample."""
    metric.update(*operands)
    metric.update(*(operand[:1] if operand.dim() > 1 else operand for operand in operands))
    return metric.compute()


def split(comm: Any, x: torch.Tensor) -> Any:
    grid = grid_over(comm, h=comm.size)
    return dc.scatter(x, grid, dims={1: "h", 3: "nhw", 4: "n-hw"}[x.dim()])


def check(found: Any, expected: Any) -> None:
    torch.testing.assert_close(whole(found).double(), expected.double(), rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning", "ignore:Metric `BinaryAUROC` will save:UserWarning")
@pytest.mark.parametrize("name", COUNTS | OTHERS)
def test_a_metric_takes_distributed_and_gathered_tensors(comm: Any, name: str) -> None:
    kind, arguments, options, predicted, true = (COUNTS | OTHERS)[name]
    expected = updated(made(kind, arguments, options), predicted, true)
    p, t = split(comm, predicted), split(comm, true)
    check(updated(made(kind, arguments, options), p, t), expected)
    check(updated(made(kind, arguments, options), dc.gather(p), dc.gather(t)), expected)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("rows", [5, 2])
@pytest.mark.parametrize("name", COUNTS)
def test_metrics_that_count_are_exact_from_blocks(comm: Any, name: str, rows: int) -> None:
    """The recipe of docs/how-to/metrics.md. Two rows are split, so the last of three ranks has no row."""
    kind, arguments, options, *operands = COUNTS[name]
    predicted, true = (operand[..., :rows, :].contiguous() for operand in operands)

    def gather_states(state: torch.Tensor, group: object = None) -> list[torch.Tensor]:
        return [torch.from_numpy(each) for each in comm.allgather(np.asarray(state))]

    together = {"dist_sync_fn": gather_states, "distributed_available_fn": lambda: True}
    p, t = split(comm, predicted), split(comm, true)
    found = updated(made(kind, arguments, options | together), p.local, t.local)
    check(found, updated(made(kind, arguments, options), predicted, true))
    texts = comm.allgather(str(found))
    assert len(set(texts)) == 1
