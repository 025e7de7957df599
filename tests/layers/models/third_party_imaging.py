"""Networks of other packages for medical images, restoration, detection and video, with few and narrow layers."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tests.layers.models.third_party_modern import _hugging
from tests.layers.models.third_party_networks import Network, _monai, _shallow, torchvision
from tests.layers.models.third_party_science import _network

IMAGES = (2, 3, 64, 96)
VOLUME = (2, 1, 16, 24, 16)
VIDEO = (2, 3, 4, 32, 48)


def _nnunet(name: str, *shape: int, **options: Any) -> Network:
    """One of nnU-Net's networks, with the blocks that its plans have."""

    def build() -> nn.Module:
        conv, norm = (nn.Conv3d, nn.InstanceNorm3d) if len(shape) == 5 else (nn.Conv2d, nn.InstanceNorm2d)
        network = getattr(importlib.import_module("dynamic_network_architectures.architectures.unet"), name)
        model: nn.Module = network(
            shape[1], 3, [4, 8, 16], conv, 3, [1, 2, 2], num_classes=3, n_conv_per_stage_decoder=1, conv_bias=True,
            norm_op=norm, norm_op_kwargs={"eps": 1e-5, "affine": True}, nonlin=nn.LeakyReLU,
            nonlin_kwargs={"inplace": True}, deep_supervision=True, **options,
        )  # fmt: skip
        return model

    return Network("dynamic_network_architectures", build, shape)


def _spandrel(folder: str, module: str, name: str, *shape: int, **options: Any) -> Network:
    def build() -> nn.Module:
        torchvision()
        package = importlib.import_module(f"spandrel.architectures.{folder}.__arch.{module}")
        network: nn.Module = getattr(package, name)(**options)
        return network

    return Network("spandrel", build, shape)


class Detector(nn.Module):
    """A detector of torchvision in training: backbone, head, anchors, matching and losses, on a batch of one size.

    Left out are the resizing of a list of images, and the choice of boxes in an evaluation.
    """

    def __init__(self, detector: nn.Module, boxes: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.detector, self.targets = detector, (boxes, labels)

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """The losses and the head's outputs."""
        detector: Any = self.detector
        features = list(detector.backbone(images).values())
        found = detector.head(features)
        lists = importlib.import_module("torchvision.models.detection.image_list")
        sizes = [tuple(images.shape[-2:])] * len(images)
        anchors = detector.anchor_generator(lists.ImageList(images, sizes), features)
        targets = [
            {"boxes": boxes.to(anchors[0]), "labels": labels} for boxes, labels in zip(*self.targets, strict=True)
        ]
        levels = [[x.shape[-2] * x.shape[-1]] for x in features] if hasattr(detector, "center_sampling_radius") else []
        losses = detector.compute_loss(targets, found, anchors, *([[n for (n,) in levels]] if levels else []))
        return [*losses.values(), *found.values()]


def _detector(name: str) -> Network:
    def build(models: Any) -> nn.Module:
        mobile = models.mobilenet_v2(weights=None, width_mult=0.25).features
        pyramid = models.detection.backbone_utils.BackboneWithFPN(
            mobile, {"6": "0", "13": "1"}, [mobile[6].out_channels, mobile[13].out_channels], 32
        )
        anchors = models.detection.anchor_utils.AnchorGenerator
        if name == "FCOS":
            generator = anchors(((8,), (16,), (32,)), ((1.0,),) * 3)
        else:
            generator = anchors(((12, 18), (24, 36), (48, 72)), ((0.5, 1.0, 2.0),) * 3)
        detector = getattr(models.detection, name)(pyramid, 4, anchor_generator=generator)
        boxes = torch.tensor([[4.0, 6, 30, 26], [20, 10, 80, 60]]), torch.tensor([[40.0, 30, 60, 62]])
        return Detector(detector, boxes, (torch.tensor([1, 3]), torch.tensor([2])))

    return _shallow(build, *IMAGES)


def _efficient(models: Any) -> nn.Module:
    fused, block = models.efficientnet.FusedMBConvConfig, models.efficientnet.MBConvConfig
    stages = [fused(1, 3, 1, 8, 8, 1), fused(4, 3, 2, 8, 16, 1), block(4, 3, 2, 16, 24, 2), block(6, 3, 1, 24, 32, 1)]
    model: nn.Module = models.EfficientNet(stages, 0.1, 0.2, num_classes=5, last_channel=64)
    return model


def _mvit(models: Any) -> nn.Module:
    block = models.video.mvit.MSBlockConfig
    stages = [
        block(1, 8, 16, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2]),
        block(2, 16, 16, [3] * 3, [3] * 3, [1] * 3, [1] * 3),
    ]
    model: nn.Module = models.video.MViT(
        (32, 48), 4, stages, residual_pool=True, residual_with_cls_embed=False, rel_pos_embed=True,
        proj_after_attn=True, num_classes=5,
    )  # fmt: skip
    return model


class SlowFastClips(nn.Module):
    """A SlowFast network with its sampling of frames in front: the slow pathway gets each fourth one."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, clip: torch.Tensor) -> torch.Tensor:
        """The scores of the classes."""
        scores: torch.Tensor = self.network([clip[:, :, ::4], clip])
        return scores


def _slowfast() -> nn.Module:
    torchvision()
    create = importlib.import_module("pytorchvideo.models.slowfast").create_slowfast
    return SlowFastClips(
        create(
            model_num_class=5, model_depth=18, stem_dim_outs=(8, 2), slowfast_channel_reduction_ratio=(4,),
            head_pool_kernel_sizes=((2, 2, 2), (8, 2, 2)), dropout_rate=0.1,
        )
    )  # fmt: skip


MODELS: dict[str, Any] = {"embed_dim": 12, "window_size": 8, "depths": [2, 2], "num_heads": [2, 2], "mlp_ratio": 2}

IMAGING = {
    "nnU-Net": _nnunet("PlainConvUNet", *VOLUME, n_conv_per_stage=1),
    "nnU-Net ResEnc": _nnunet("ResidualEncoderUNet", *VOLUME, n_blocks_per_stage=[1, 2, 1]),
    "nnU-Net ResEnc, 2-D": _nnunet("ResidualEncoderUNet", 2, 1, 48, 40, n_blocks_per_stage=[1, 2, 2]),
    "MedNeXt": _monai("MedNeXt", 2, 1, 16, 32, 16, init_filters=4, kernel_size=5, deep_supervision=True,
        blocks_down=(1, 1, 1, 1), blocks_bottleneck=1, blocks_up=(1, 1, 1, 1), use_residual_connection=True),
    "UNet++": _monai("BasicUNetPlusPlus", 2, 1, 32, 48, features=(4, 4, 8, 8, 16, 4), deep_supervision=True),
    "HighResNet": _monai("HighResNet", *VOLUME, layer_params=(
        {"name": "conv_0", "n_features": 4, "kernel_size": 3},
        {"name": "res_1", "n_features": 4, "kernels": (3, 3), "repeat": 1},
        {"name": "res_2", "n_features": 8, "kernels": (3, 3), "repeat": 2},
        {"name": "conv_1", "n_features": 8, "kernel_size": 1},
        {"name": "conv_2", "kernel_size": 1},
    )),
    "Restormer": _network("monai.networks.nets.restormer.Restormer", 2, 3, 32, 48, dim=8, num_blocks=(1, 1, 1),
        heads=(1, 2, 4), num_refinement_blocks=1),
    "SwinIR": _spandrel("SwinIR", "SwinIR", "SwinIR", 2, 3, 32, 48, img_size=32, upscale=2,
        upsampler="pixelshuffle", **MODELS),
    "HAT": _spandrel("HAT", "HAT", "HAT", 2, 3, 32, 48, img_size=32, upscale=2, num_feat=8, compress_ratio=3,
        squeeze_factor=4, **MODELS),
    "NAFNet": _spandrel("NAFNet", "NAFNet_arch", "NAFNet", *IMAGES, width=8, enc_blk_nums=[1, 1, 1],
        dec_blk_nums=[1, 1, 1]),
    "SCUNet": _spandrel("SCUNet", "SCUNet", "SCUNet", 2, 3, 64, 64, config=[1] * 7, dim=64, input_resolution=64),
    "EfficientNet v2": _shallow(_efficient, 3, 3, 67, 75),
    "RetinaNet, losses": _detector("RetinaNet"),
    "FCOS, losses": _detector("FCOS"),
    "SAM image encoder": _hugging("SamVisionModel", 2, 3, 64, 64, hidden_size=24, output_channels=8,
        num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=8, window_size=5,
        global_attn_indexes=[1], mlp_dim=48),
    "Swin2SR": _hugging("Swin2SRForImageSuperResolution", 2, 3, 32, 48, image_size=32, embed_dim=12, depths=[2, 2],
        num_heads=[2, 2], window_size=8, mlp_ratio=2.0, upscale=2),
    "Video Swin": _shallow(lambda m: m.video.SwinTransformer3d([2, 4, 4], 12, [2, 2], [2, 2], [2, 4, 4],
        stochastic_depth_prob=0.1, num_classes=5), *VIDEO),
    "MViT": _shallow(_mvit, *VIDEO),
    "SlowFast": Network("pytorchvideo", _slowfast, (2, 3, 8, 48, 64)),
}  # fmt: skip
"""Run on request only."""
