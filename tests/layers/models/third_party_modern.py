"""Networks of other packages that mix space by attention, windows, transforms, gates or recurrences.

Unmodified, with few classes, on small inputs, and where their options allow it with few layers.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.layers.models.third_party_networks import Network, _monai, _segmentation, _shallow, hide_kernels, torchvision

IMAGES = (2, 3, 64, 96)


def _timm(name: str, *shape: int, **options: Any) -> Network:
    def build() -> nn.Module:
        torchvision()
        model: nn.Module = importlib.import_module("timm").create_model(name, num_classes=5, **options)
        return model

    return Network("timm", build, shape or IMAGES)


def _hugging(model: str, *shape: int, **options: Any) -> Network:
    """``model`` of transformers, and its configuration with these ``options``."""

    def build() -> nn.Module:
        torchvision()
        hide_kernels()
        kind = getattr(importlib.import_module("transformers"), model)
        network: nn.Module = kind(kind.config_class(num_labels=5, **options))
        return network

    return Network("transformers", build, shape or IMAGES)


def _operator(name: str, **options: Any) -> Network:
    """A network of neuraloperator, with its complex weights in double precision, too."""

    def build() -> nn.Module:
        network = getattr(importlib.import_module("neuralop.models"), name)
        model: nn.Module = network(in_channels=2, out_channels=2, hidden_channels=8, **options)
        return model._apply(lambda t: t.to(torch.complex128) if t.is_complex() else t)

    return Network("neuralop", build, (2, 2, 12, 16))


SIZE = {"img_size": (64, 96)}

MODERN = {
    "ViT": _timm("vit_tiny_patch16_224", **SIZE, depth=2, embed_dim=24, num_heads=3),
    "DeiT, distilled": _timm("deit_tiny_distilled_patch16_224", **SIZE, depth=2, embed_dim=24, num_heads=3),
    "BEiT": _timm("beit_base_patch16_224", **SIZE, depth=2, embed_dim=24, num_heads=2),
    "EVA-02": _timm("eva02_tiny_patch14_224", 2, 3, 56, 84, img_size=(56, 84), depth=2, embed_dim=24, num_heads=3),
    "CaiT": _timm("cait_xxs24_224", **SIZE, depth=2, embed_dim=24, num_heads=2),
    "XCiT": _timm("xcit_nano_12_p16_224", **SIZE, depth=2, embed_dim=24, num_heads=2),
    "Swin": _timm(
        "swin_tiny_patch4_window7_224", 2, 3, 56, 112, img_size=(56, 112), depths=(2, 2), embed_dim=12, num_heads=(2, 4)
    ),
    "Swin v2": _timm("swinv2_tiny_window8_256", **SIZE, depths=(2, 2), embed_dim=12, num_heads=(2, 4)),
    "Twins SVT": _timm("twins_svt_small", **SIZE, depths=(1, 1, 2, 1), embed_dims=(8, 16, 24, 32),
        num_heads=(1, 2, 2, 2)),
    "PVT v2": _timm("pvt_v2_b0", depths=(1, 1, 1, 1)),
    "CoaT-lite": _timm("coat_lite_tiny", **SIZE),
    "MobileViT": _timm("mobilevit_xxs"),
    "MobileViT v2": _timm("mobilevitv2_050"),
    "EdgeNeXt": _timm("edgenext_xx_small"),
    "EfficientFormer v2": _timm("efficientformerv2_s0", 2, 3, 64, 64, img_size=64),
    "LeViT": _timm("levit_128s", 5, 3, 64, 64, img_size=64),
    "GC ViT": _timm("gcvit_xxtiny", 2, 3, 64, 64, img_size=64),
    "DaViT": _timm("davit_tiny", depths=(1, 1), embed_dims=(12, 24), num_heads=(2, 2)),
    "FocalNet": _timm("focalnet_tiny_srf"),
    "MLP-Mixer": _timm("mixer_s32_224", 2, 3, 64, 64, img_size=64),
    "gMLP": _timm("gmlp_ti16_224", 2, 3, 64, 64, img_size=64),
    "Sequencer": _timm("sequencer2d_s", layers=(1, 1, 1, 1), embed_dims=(12, 24, 24, 24), hidden_sizes=(3, 6, 6, 6)),
    "PoolFormer": _timm("poolformer_s12"),
    "BoTNet": _timm("botnet26t_256", 2, 3, 64, 64, img_size=64),
    "HaloNet": _timm("halonet26t", 2, 3, 256, 256),
    "LambdaResNet": _timm("lambda_resnet26rpt_256", 2, 3, 256, 256),
    "ResNeSt": _timm("resnest14d"),
    "SK-ResNet": _timm("skresnet18"),
    "NFNet": _timm("nfnet_l0"),
    "RegNetY": _timm("regnety_002"),
    "Res2Net": _timm("res2net50_26w_4s"),
    "HRNet": _timm("hrnet_w18_small"),
    "GhostNet": _timm("ghostnet_100"),
    "EfficientViT": replace(_timm("efficientvit_b0"), dtype=torch.float32),  # attends in single precision
    "FastViT": _timm("fastvit_t8"),
    "ConvNeXt v2": _timm("convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    "MaxViT": _shallow(
        lambda m: m.MaxVit((64, 64), 8, 4, [8, 16], [1, 1], 4, stochastic_depth_prob=0.1, num_classes=5), 2, 3, 64, 64
    ),
    "Swin of torchvision": _shallow(
        lambda m: m.SwinTransformer([4, 4], 12, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.1,
            num_classes=5), *IMAGES
    ),
    "Dinov2": _hugging(
        "Dinov2ForImageClassification", 2, 3, 56, 84, hidden_size=24, num_hidden_layers=2,
            num_attention_heads=2, image_size=56
    ),
    "DPT": _hugging(
        "DPTForSemanticSegmentation", 2, 3, 64, 64, hidden_size=24, num_hidden_layers=4, num_attention_heads=2,
            image_size=64,
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, intermediate_size=32,
    ),
    "MONAI SwinUNETR": _monai("SwinUNETR", 1, 1, 64, 96, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2)),
    "MONAI UNETR": _monai(
        "UNETR", 1, 1, 64, 96, img_size=(64, 96), feature_size=8, hidden_size=24, mlp_dim=48, num_heads=3
    ),
    "MONAI AttentionUnet": _monai("AttentionUnet", 2, 1, 16, 24, 16, channels=(4, 8, 16), strides=(2, 2)),
    "MONAI AutoencoderKL": _monai(
        "AutoencoderKL", 2, 1, 16, 24, channels=(8, 8), num_res_blocks=1, attention_levels=(False, True),
            norm_num_groups=4,
        latent_channels=3,
    ),
    "SMP MAnet": _segmentation("MAnet", "resnet18", *IMAGES, decoder_channels=(32, 16, 16, 16, 16),
        decoder_pab_channels=8),
    "SMP Segformer": _segmentation("Segformer", "tu-mobilenetv3_small_050", *IMAGES, decoder_segmentation_channels=16),
    "SMP UPerNet": _segmentation("UPerNet", "tu-mobilenetv3_small_050", *IMAGES, decoder_channels=16),
    "SMP U-Net with scSE": _segmentation("Unet", "tu-mobilenetv3_small_050", *IMAGES, decoder_attention_type="scse"),
    "FNO": _operator("FNO", n_modes=(4, 4), n_layers=2),
    "TFNO": _operator("TFNO", n_modes=(4, 4), n_layers=2, rank=0.5, factorization="tucker",
        implementation="factorized"),
    "U-NO": _operator("UNO", uno_out_channels=[8, 8, 8], uno_n_modes=[[4, 4]] * 3, n_layers=3,
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2, 2]], channel_mlp_skip="linear"),
}  # fmt: skip
"""Large enough that they are run on request only."""
