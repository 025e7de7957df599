"""Losses, of samples and of pixels, with all that changes what their mean divides by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.conformance.case import Case, Input, case, fixed, modules, plain

_X, _ROWS = Input("N C H W"), Input("N C")
_LABELS, _CLASSES = Input("N H W", "classes"), Input("N", "classes")
_TARGET, _UNIT = fixed("N C H W", "unit"), Input("N C H W", "unit")
_WEIGHT = plain("c", "positive", grad=False)


def _weighted(function: Callable[..., torch.Tensor], **options: Any) -> Callable[..., torch.Tensor]:
    return lambda x, t, w: function(x, t, weight=w, **options)


def _with(function: Callable[..., torch.Tensor], **options: Any) -> Callable[..., torch.Tensor]:
    return lambda *given: function(*given, **options)


def _dice(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    p = torch.sigmoid(x)
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def _dice_per_sample(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    p = x.softmax(1)
    both = (p * t).sum((2, 3))
    return (1 - (2 * both + 1) / (p.sum((2, 3)) + t.sum((2, 3)) + 1)).mean()


def _focal(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    ce = F.cross_entropy(x, t, reduction="none")
    return ((1 - torch.exp(-ce)) ** 2 * ce).mean()


def _variation(x: torch.Tensor) -> torch.Tensor:
    return (x[:, :, 1:] - x[:, :, :-1]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()


_CROSS_ENTROPY: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignore_index": {"ignore_index": 1},
    "label_smoothing": {"label_smoothing": 0.1},
    "ignore_index, label_smoothing": {"ignore_index": 0, "label_smoothing": 0.2},
}

_OF_TWO: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(F, name) for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")
}

_NLL = "of log_softmax"
_BCE = "binary_cross_entropy_with_logits"

CASES: tuple[Case, ...] = (
    *(
        case("cross_entropy", f"pixels, {n}", _with(F.cross_entropy, **o), _X, _LABELS)
        for n, o in _CROSS_ENTROPY.items()
    ),
    *(
        case("cross_entropy", f"pixels, class weights, {n}", _weighted(F.cross_entropy, **o), _X, _LABELS, _WEIGHT)
        for n, o in _CROSS_ENTROPY.items()
    ),
    case("cross_entropy", "samples", F.cross_entropy, _ROWS, _CLASSES),
    case("cross_entropy", "samples, class weights", _weighted(F.cross_entropy), _ROWS, _CLASSES, _WEIGHT),
    case("cross_entropy", "voxels", F.cross_entropy, Input("N C D H W"), Input("N D H W", "classes")),
    case("cross_entropy", "probabilities", F.cross_entropy, _X, fixed("N C H W", "probabilities")),
    case(
        "cross_entropy",
        "probabilities, class weights",
        _weighted(F.cross_entropy, label_smoothing=0.1),
        *(_X, fixed("N C H W", "probabilities"), _WEIGHT),
    ),
    case("cross_entropy", "plain labels", F.cross_entropy, _X, plain("n h w", "classes")),
    case("cross_entropy", "plain logits", F.cross_entropy, plain("n c h w"), _LABELS),
    case("cross_entropy", "balanced labels", F.cross_entropy, _X, Input("N H W", "classes", layout="balanced")),
    case("nll_loss", f"{_NLL}, pixels", lambda x, t: F.nll_loss(F.log_softmax(x, 1), t), _X, _LABELS),
    case(
        "nll_loss",
        f"{_NLL}, class weights, ignore_index",
        lambda x, t, w: F.nll_loss(F.log_softmax(x, 1), t, w, ignore_index=1),
        *(_X, _LABELS, _WEIGHT),
    ),
    *modules("nn.CrossEntropyLoss", "pixels", lambda sizes: nn.CrossEntropyLoss(), _X, _LABELS)[:1],
    *modules(
        "nn.CrossEntropyLoss",
        "class weights, ignore_index, label_smoothing",
        lambda sizes: nn.CrossEntropyLoss(torch.arange(1.0, sizes["c"] + 1), ignore_index=2, label_smoothing=0.1),
        *(_X, _LABELS),
    ),
    *(
        case(_BCE, reduction, _with(F.binary_cross_entropy_with_logits, reduction=reduction), _X, _TARGET)
        for reduction in ("mean", "sum", "none")
    ),
    case(
        _BCE,
        "weight, pos_weight",
        lambda x, t, w, p: F.binary_cross_entropy_with_logits(x, t, w, pos_weight=p),
        *(_X, _TARGET, fixed("N C H W", "positive"), plain("c 1 1", "positive", grad=False)),
    ),
    case("binary_cross_entropy", "mean", F.binary_cross_entropy, _UNIT, _TARGET),
    *(case(name, "mean", function, _X, fixed("N C H W")) for name, function in _OF_TWO.items()),
    case("mse_loss", "sum", _with(F.mse_loss, reduction="sum"), _X, _X),
    case("mse_loss", "none", _with(F.mse_loss, reduction="none"), _X, _X),
    case("mse_loss", "plain target", F.mse_loss, _X, plain("n c h w")),
    case("mse_loss", "gradients of both", F.mse_loss, _X, _X),
    case("l1_loss", "plain input", F.l1_loss, plain("n c h w"), _X),
    case("smooth_l1_loss", "beta=0.3, sum", _with(F.smooth_l1_loss, beta=0.3, reduction="sum"), _X, _X),
    case("huber_loss", "delta=0.3", _with(F.huber_loss, delta=0.3), _X, _X),
    case("kl_div", "batchmean", _with(F.kl_div, reduction="batchmean"), _X, fixed("N C H W", "probabilities")),
    case("kl_div", "log_target", _with(F.kl_div, log_target=True), _X, _X),
    case("poisson_nll_loss", "mean", F.poisson_nll_loss, _X, fixed("N C H W", "positive")),
    case("gaussian_nll_loss", "mean", F.gaussian_nll_loss, _X, _X, Input("N C H W", "positive")),
    case("hinge_embedding_loss", "mean", F.hinge_embedding_loss, _X, fixed("N C H W", "signs")),
    case("margin_ranking_loss", "mean", F.margin_ranking_loss, _X, _X, fixed("N C H W", "signs")),
    case("triplet_margin_loss", "mean", F.triplet_margin_loss, _ROWS, _ROWS, _ROWS),
    case("cosine_embedding_loss", "mean", F.cosine_embedding_loss, _ROWS, _ROWS, fixed("N", "signs")),
    case("multilabel_soft_margin_loss", "mean", F.multilabel_soft_margin_loss, _ROWS, fixed("N C", "unit")),
    case("Dice", "of the batch", _dice, _X, _TARGET),
    case("Dice", "per sample and class", _dice_per_sample, _X, _TARGET),
    case("focal loss", "pixels", _focal, _X, _LABELS),
    case("total variation", "", _variation, _X, least={"h": 2, "w": 2}),
)
