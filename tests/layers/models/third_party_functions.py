"""Losses, metrics, augmentations, layers and optimizers of other packages, and inputs for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.distconv.layouts import normal
from tests.layers.models.third_party_networks import torchvision

SPACE = (12, 10)


def inputs() -> dict[str, torch.Tensor]:
    """Samples of images, of maps of logits and of labels, and rows of features with a class each."""

    def uniform(*shape: int, seed: int) -> torch.Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    labels = (uniform(2, *SPACE, seed=3) * 3).long()
    rows = uniform(9, 4, seed=6)
    return {
        "images": uniform(2, 3, *SPACE, seed=1),
        "others": uniform(2, 3, *SPACE, seed=2),
        "gray": uniform(2, 1, *SPACE, seed=8),
        "logits": normal(2, 3, *SPACE, seed=4),
        "displacements": normal(2, 2, *SPACE, seed=5),
        "labels": labels,
        "label images": labels[:, None],
        "binary": (labels[:, None] > 0).long(),
        "one-hot": F.one_hot(labels, 3).permute(0, 3, 1, 2).double().contiguous(),
        "features": normal(2, 8, *SPACE, seed=9),
        "rows": rows,
        "targets": uniform(9, 4, seed=10),
        "shares": (rows / rows.sum(1, keepdim=True)),
        "classes": (rows.sum(1) * 7).long() % 4,
    }


@dataclass(frozen=True)
class Call:
    """A function or a class of a package, its options, and the inputs that it or its instance is called with."""

    module: str
    name: str
    options: Mapping[str, Any]
    takes: tuple[str, ...]
    tolerance: float
    """Relative; more for what computes in float32 whatever it gets."""

    @property
    def package(self) -> str:
        """What has to be installed."""
        return self.module.partition(".")[0]

    def made(self) -> Callable[..., Any]:
        """The called function, identical on all ranks."""
        torchvision()  # timm imports it
        found = getattr(importlib.import_module(self.module), self.name)
        if not isinstance(found, type):
            return partial(found, **self.options)
        torch.manual_seed(0)
        instance: Callable[..., Any] = found(**self.options)
        return instance.double() if isinstance(instance, nn.Module) else instance


CALLS: dict[str, Call] = {}
EXACT, SINGLE = 1e-9, 2e-6


def call(module: str, *takes: str, tolerance: float = EXACT, **options: Mapping[str, Any]) -> None:
    """Add functions or classes of ``module`` with their options; what follows two underscores tells two apart."""
    for name, chosen in options.items():
        CALLS[f"{module}.{name}"] = Call(module, name.partition("__")[0], chosen, takes, tolerance)


soft: dict[str, Any] = {"softmax": True, "to_onehot_y": True}
call(
    "monai.losses",
    "logits",
    "label images",
    tolerance=SINGLE,
    DiceLoss=soft,
    DiceLoss__jaccard=soft | {"squared_pred": True, "jaccard": True, "include_background": False},
    DiceLoss__batch=soft | {"batch": True, "weight": [1.0, 2.0, 3.0]},
    GeneralizedDiceLoss=soft,
    DiceCELoss=soft,
    DiceFocalLoss=soft,
    TverskyLoss=soft,
    FocalLoss={"to_onehot_y": True, "use_softmax": True, "gamma": 1.5},
)
call(
    "monai.losses",
    "gray",
    "gray",
    tolerance=SINGLE,
    GlobalMutualInformationLoss={},
    LocalNormalizedCrossCorrelationLoss={"spatial_dims": 2, "kernel_size": 5},
    SSIMLoss={"spatial_dims": 2, "win_size": 5},
)
call("monai.losses", "displacements", BendingEnergyLoss={}, DiffusionLoss={})
call("monai.losses", "rows", "targets", ContrastiveLoss={}, BarlowTwinsLoss={})
for kind, pair in {"multiclass": ("logits", "labels"), "multilabel": ("logits", "one-hot")}.items():
    losses = {f"{name}__{kind}": {"mode": kind} for name in ("DiceLoss", "JaccardLoss", "FocalLoss", "TverskyLoss")}
    call("segmentation_models_pytorch.losses", *pair, tolerance=SINGLE, **losses)
call("segmentation_models_pytorch.losses", "logits", "labels", SoftCrossEntropyLoss={"smooth_factor": 0.1})
call(
    "timm.loss",
    "rows",
    "classes",
    LabelSmoothingCrossEntropy={},
    AsymmetricLossSingleLabel={},
    BinaryCrossEntropy={"smoothing": 0.1},
    JsdCrossEntropy={"num_splits": 3},
)
call("timm.loss", "rows", "shares", tolerance=SINGLE, SoftTargetCrossEntropy={}, AsymmetricLossMultiLabel={})
call(
    "kornia.losses",
    "images",
    "others",
    ssim_loss={"window_size": 5},
    psnr_loss={"max_val": 1.0},
    charbonnier_loss={"reduction": "mean"},
)
call(
    "kornia.losses",
    "logits",
    "labels",
    dice_loss={},
    lovasz_softmax_loss={},
    focal_loss={"alpha": 0.5, "reduction": "mean"},
    tversky_loss={"alpha": 0.4, "beta": 0.6},
)
call(
    "kornia.filters",
    "images",
    gaussian_blur2d={"kernel_size": (3, 3), "sigma": (1.0, 1.0)},
    sobel={},
    spatial_gradient={},
    median_blur={"kernel_size": 3},
    canny={},
    bilateral_blur={"kernel_size": 3, "sigma_color": 0.1, "sigma_space": (1.0, 1.0)},
)
call(
    "kornia.geometry.transform",
    "images",
    rotate={"angle": torch.tensor([10.0, 20.0]).double()},
    resize={"size": (7, 9)},
    pyrdown={},
    hflip={},
)
call("kornia.color", "images", rgb_to_hsv={}, rgb_to_lab={}, rgb_to_ycbcr={})
call("kornia.enhance", "images", equalize={}, posterize={"bits": 3}, adjust_hue={"factor": 0.3})
call(
    "kornia.augmentation",
    "images",
    RandomAffine={"degrees": 15.0, "p": 1.0},
    RandomErasing={"p": 1.0},
    ColorJitter={"brightness": 0.2, "hue": 0.1, "p": 1.0},
    RandomCrop={"size": (8, 8)},
    RandomHorizontalFlip={},
    RandomGaussianNoise={"p": 1.0},
)
call(
    "torchvision.transforms.v2.functional",
    "images",
    rotate={"angle": 17.0},
    resize={"size": [7, 9]},
    gaussian_blur={"kernel_size": [3, 3]},
    adjust_contrast={"contrast_factor": 1.2},
    affine={"angle": 10.0, "translate": [1, 2], "scale": 1.1, "shear": [3.0, 0.0]},
)
call(
    "torchvision.transforms.v2",
    "images",
    RandomResizedCrop={"size": 8},
    RandomHorizontalFlip={},
    ColorJitter={"brightness": 0.2, "contrast": 0.2},
    RandomErasing={"p": 1.0},
)
metrics = ("accuracy", "f1_score", "jaccard_index", "confusion_matrix", "matthews_corrcoef")
call(
    "torchmetrics.functional.classification",
    "logits",
    "labels",
    **{f"multiclass_{name}": {"num_classes": 3} for name in metrics},
)
call(
    "torchmetrics.functional.classification",
    "gray",
    "binary",
    binary_auroc={},
    binary_roc={},
    binary_average_precision={},
    binary_f1_score={},
)
call(
    "torchmetrics.functional",
    "rows",
    "targets",
    mean_squared_error={},
    r2_score={},
    pearson_corrcoef={},
    spearman_corrcoef={},
    explained_variance={},
)
call("torchmetrics.functional", "rows", "targets", tolerance=SINGLE, cosine_similarity={})
call(
    "torchmetrics.functional.image",
    "images",
    "others",
    peak_signal_noise_ratio={"data_range": 1.0},
    structural_similarity_index_measure={"data_range": 1.0},
)
call(
    "timm.layers",
    "features",
    BlurPool2d={"channels": 8},
    SelectiveKernel={"in_channels": 8},
    EcaModule={"channels": 8},
    GlobalContext={"channels": 8},
    NonLocalAttn={"in_channels": 8},
    SplitAttn={"in_channels": 8},
    StdConv2dSame={"in_channel": 8, "out_channels": 4, "kernel_size": 3},
    MixedConv2d={"in_channels": 8, "out_channels": 8, "kernel_size": [3, 5]},
    LayerNorm2d={"num_channels": 8},
    AttentionPool2d={"in_features": 8, "feat_size": SPACE, "num_heads": 2},
    Attention2d={"dim": 8, "num_heads": 2},
    DropBlock2d={"drop_prob": 0.3, "block_size": 3},
    DropPath={"drop_prob": 0.4},
    SelectAdaptivePool2d={"pool_type": "catavgmax", "flatten": True},
)
call(
    "timm.layers",
    "features",
    tolerance=SINGLE,
    EvoNorm2dB0={"num_features": 8},
    FilterResponseNormTlu2d={"num_features": 8},
)
call(
    "monai.networks.layers",
    "images",
    GaussianFilter={"spatial_dims": 2, "sigma": 1.0},
    MedianFilter={"radius": 1, "spatial_dims": 2},
)

OPTIMIZERS = """
adabelief adafactor adamod adan adashift adopt came diffgrad lamb lars laprop lion madgrad mars novograd prodigy racs
scalableshampoo shampoo soap tiger yogi
""".split()
"""Of the package pytorch_optimizer."""
