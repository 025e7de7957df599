"""MONAI's transforms and metrics called with DistTensors: results of one process, split, or gathered with a warning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from tests.distconv.layouts import grid_over, normal
from tests.layers.compare import whole

monai = pytest.importorskip("monai", reason="needs the package monai")
pytestmark = [
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.long,
    pytest.mark.usefixtures("fallback"),
    pytest.mark.filterwarnings("ignore:monai:FutureWarning"),
]

CLASSES = 3
LOGITS = normal(2, CLASSES, 7, 8, 5, seed=1)
LABEL = normal(2, 1, 7, 8, 5, seed=2).gt(0).long() + normal(2, 1, 7, 8, 5, seed=3).gt(0.8)


def one_hot(labels: torch.Tensor) -> torch.Tensor:
    return F.one_hot(labels[:, 0], CLASSES).movedim(-1, 1).float()


PREDICTED, TRUE = one_hot(LOGITS.argmax(1, keepdim=True)), one_hot(LABEL)


@pytest.fixture(params=[True, False], ids=["MetaTensor", "no meta data"])
def track(request: Any) -> Iterator[bool]:
    before = monai.data.get_track_meta()
    monai.data.set_track_meta(request.param)
    yield request.param
    monai.data.set_track_meta(before)


def transform(name: str, **options: Any) -> Callable[..., Any]:
    return getattr(importlib.import_module("monai.transforms"), name)(**options)  # type: ignore[no-any-return]


def metric(name: str, *given: Any, **options: Any) -> Callable[..., Any]:
    made = getattr(importlib.import_module("monai.metrics"), name)(*given, **options)

    def call(predicted: Any, true: Any) -> Any:
        made.reset()
        made(predicted, true)
        made(predicted[:1], true[:1])
        return made.aggregate()

    return call


TRANSFORMS = {
    "argmax": ("AsDiscrete", {"argmax": True, "to_onehot": CLASSES}),
    "threshold": ("AsDiscrete", {"threshold": 0.5}),
    "rounding": ("AsDiscrete", {"rounding": "torchrounding"}),
    "sigmoid": ("Activations", {"sigmoid": True}),
    "softmax": ("Activations", {"softmax": True}),
    "other": ("Activations", {"other": torch.tanh}),
    "type": ("EnsureType", {}),
    "dtype": ("EnsureType", {"dtype": torch.float32}),
}
METRICS = {
    "Dice": ("DiceMetric", {}),
    "Dice of labels": ("DiceMetric", {"num_classes": CLASSES, "reduction": "mean_batch", "get_not_nans": True}),
    "Hausdorff": ("HausdorffDistanceMetric", {"include_background": True}),
    "Hausdorff, percentile": ("HausdorffDistanceMetric", {"percentile": 95, "directed": True}),
    "surface distance": ("SurfaceDistanceMetric", {"symmetric": True}),
    "surface Dice": ("SurfaceDiceMetric", {"class_thresholds": [1.0, 1.0]}),
    "IoU": ("MeanIoU", {}),
    "confusion matrix": ("ConfusionMatrixMetric", {}),
}


def grid_for(comm: Any) -> dc.ProcessGrid:
    return grid_over(comm, **({"h": comm.size} if comm.size > 1 else {"n": 1}))


def plain(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [whole(each).detach().as_subclass(torch.Tensor) for each in values]


def check(found: Any, expected: Any) -> None:
    for a, b in zip(plain(found), plain(expected), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, equal_nan=True)  # MONAI converts results to float32


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_gives_the_values_of_one_process(comm: Any, name: str, track: bool) -> None:
    kind, options = TRANSFORMS[name]
    x = dc.scatter(LOGITS, grid_for(comm))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [transform(kind, **options)(x[0]) for _ in range(2)]
    gathered = [each for each in caught if issubclass(each.category, dc.ReplicationWarning)]
    check(found, [transform(kind, **options)(LOGITS[0])] * 2)
    # MetaTensor's constructor is one call site.
    assert len(gathered) == (track and comm.size > 1)
    # MONAI writes one-hot labels into a plain tensor, which is full.
    full = monai.data.MetaTensor if track else torch.Tensor if "to_onehot" in options else dc.DistTensor
    assert isinstance(found[0], full)
    assert not gathered or "monai.data.set_track_meta(False)" in str(gathered[0].message)


@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_that_of_one_process(comm: Any, name: str, track: bool) -> None:
    kind, options = METRICS[name]
    predicted, true = (PREDICTED.argmax(1, keepdim=True), LABEL) if "num_classes" in options else (PREDICTED, TRUE)
    grid = grid_for(comm)
    expected = metric(kind, **options)(predicted, true)
    p, t = dc.scatter(predicted, grid), dc.scatter(true, grid)
    check(metric(kind, **options)(p, t), expected)
    check(metric(kind, **options)(transform("EnsureType")(p), t), expected)  # a MetaTensor with a DistTensor


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
def test_a_loss_of_transformed_outputs_has_the_gradient_of_one_process(comm: Any, track: bool) -> None:
    loss = importlib.import_module("monai.losses").DiceLoss(to_onehot_y=True)

    def step(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        loss(transform("Activations", softmax=True, dim=1)(x), t).backward()
        return whole(x.grad)

    grid = grid_for(comm)
    found = step(dc.scatter(LOGITS, grid).requires_grad_(), dc.scatter(LABEL, grid))
    torch.testing.assert_close(found, step(LOGITS.clone().requires_grad_(), LABEL), rtol=1e-6, atol=1e-9)


def by_windows(model: Any, x: Any, window: tuple[int, ...], overlap: float) -> Any:
    """The recipe of docs/how-to/medical-images.md: each rank keeps its block of the input and of the output."""
    utils = importlib.import_module("monai.data.utils")
    space, out = tuple(x.shape[2:]), None
    window = tuple(min(pair) for pair in zip(window, space, strict=True))
    steps = tuple(w if w == n else int(w * (1 - overlap)) for w, n in zip(window, space, strict=True))
    weight = utils.compute_importance_map(window, mode="gaussian", sigma_scale=0.125, dtype=x.dtype)
    for part in utils.dense_patch_slices(space, window, steps):
        y = model(x[(..., *part)].redistribute(x.dist))
        if out is None:
            out, total = x.new_zeros((1, y.shape[1], *space)), x.new_zeros((1, 1, *space))
        out[(..., *part)] += y * weight
        total[(..., *part)] += weight
    return out / total


@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
@pytest.mark.parametrize(("window", "overlap"), [((12, 8, 9), 0.5), ((5, 13, 4), 0.25), ((20, 4, 9), 0.0)])
def test_sliding_windows_over_a_volume_give_the_output_of_one_process(
    comm: Any, window: tuple[int, ...], overlap: float
) -> None:
    """Windows are larger than the block of a rank, or lie in the block of one rank."""
    torch.manual_seed(0)
    layers = [nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.ReLU(), nn.Conv3d(4, 2, 3, padding=1)]
    net, x = nn.Sequential(*layers).double().eval(), normal(1, 1, 20, 13, 9, seed=5)
    inferer = importlib.import_module("monai.inferers").SlidingWindowInferer(window, 2, overlap, mode="gaussian")
    grid = grid_over(comm, d=comm.size) if comm.size > 1 else grid_over(comm, n=1)
    with torch.no_grad():
        expected = inferer(x, net)
        model, split = dc.parallelize(net, grid), dc.scatter(x, grid)
        found = {
            "windows scattered": inferer(x, lambda part: dc.gather(model(dc.scatter(part, grid)))),
            "volume scattered": inferer(split, model),
            "nothing gathered": by_windows(model, split, window, overlap),
        }
    assert isinstance(found["nothing gathered"], dc.DistTensor)
    assert found["nothing gathered"].local.numel() <= -(-20 // comm.size) * 13 * 9 * 2
    for values in found.values():
        torch.testing.assert_close(whole(values), expected, rtol=1e-10, atol=1e-12)
