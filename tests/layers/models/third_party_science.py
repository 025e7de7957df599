"""Networks of other packages for weather, physics and diffusion, unmodified, with few and narrow layers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from tests.layers.models.third_party_networks import Axes, Network, _monai, hide_kernels, torchvision

MAPS, POINTS = (2, 3, 32, 48), (2, 48, 3)
TIME = (((2,), "n"),)
"""A time or a noise level for each sample."""
ON_POINTS: Axes = ("n", "h", None)
"""Points of a mesh, and their features."""


def _network(
    path: str, *shape: int, dims: Axes = None, others: Any = (), dtype: torch.dtype = torch.float64, **options: Any
) -> Network:
    """A class at ``path`` of a package, with these ``options``."""
    module, _, name = path.rpartition(".")

    def build() -> nn.Module:
        torchvision()
        hide_kernels()
        kind = getattr(importlib.import_module(module), name)
        torch.manual_seed(5)  # again: the first import of a package may have drawn random numbers
        network: nn.Module = kind(**options)
        return network

    return Network(path.partition(".")[0], build, shape, dtype, dims, others)


def _physics(path: str, *shape: int, **options: Any) -> Network:
    return _network(f"physicsnemo.{path}", *shape, **options)


def _diffusers(name: str, *shape: int, **options: Any) -> Network:
    return _network(f"diffusers.{name}", *shape, others=TIME, **options)


NARROW: dict[str, Any] = {"n_layers": 2, "n_hidden": 16, "n_head": 4, "slice_num": 6, "mlp_ratio": 2}
SONG: dict[str, Any] = {"in_channels": 3, "out_channels": 3, "model_channels": 8, "channel_mult": [1, 2],
    "num_blocks": 1, "dropout": 0.1}  # fmt: skip

SCIENCE = {
    "AFNO (FourCastNet)": _physics("models.afno.AFNO", *MAPS, inp_shape=[32, 48], in_channels=3, out_channels=3,
        patch_size=[4, 4], embed_dim=16, depth=2, num_blocks=4, dtype=torch.float32),
    "ModAFNO": _physics("models.afno.ModAFNO", *MAPS, others=(((2, 1), ("n", None)),), inp_shape=[32, 48],
        in_channels=3, out_channels=3, patch_size=[4, 4], embed_dim=16, depth=2, num_blocks=4, mod_dim=8,
        embed_model={"dim": 8, "depth": 1}, dtype=torch.float32),
    "SFNO": _network("torch_harmonics.examples.models.SphericalFourierNeuralOperator", *MAPS, img_size=(32, 48),
        scale_factor=2, embed_dim=8, num_layers=2, dtype=torch.float32),
    "Spherical U-Net": _network("torch_harmonics.examples.models.SphericalUNet", *MAPS, img_size=(32, 48),
        embed_dims=[8, 16], depths=[1, 1], in_chans=3, out_chans=3),
    "Pangu-Weather": _physics("models.pangu.Pangu", 2, 72, 32, 48, img_size=(32, 48), patch_size=(2, 4, 4),
        embed_dim=12, num_heads=(2, 2, 2, 2), window_size=(2, 2, 3)),
    "FengWu": _physics("models.fengwu.Fengwu", 2, 24, 16, 24, img_size=(16, 24), pressure_level=4, patch_size=(4, 4),
        embed_dim=12, num_heads=(2, 2, 2, 2), window_size=(2, 2, 3)),
    "DLWP": _physics("models.dlwp.DLWP", 2, 2, 6, 16, 16, nr_input_channels=2, nr_output_channels=2,
        nr_initial_channels=4, depth=2, dims=("n", "c", None, "h", "w")),
    "DiT": _physics("models.dit.DiT", *MAPS, others=TIME, input_size=(32, 48), in_channels=3, patch_size=(4, 4),
        hidden_size=24, depth=2, num_heads=3, mlp_ratio=2.0),
    "SongUNet (DDPM++)": _physics("models.diffusion_unets.SongUNet", 2, 3, 16, 16, others=TIME, img_resolution=16,
        attn_resolutions=[8], **SONG),
    "SongUNet (NCSN++)": _physics("models.diffusion_unets.SongUNet", 2, 3, 16, 24, others=TIME, img_resolution=[16, 24],
        embedding_type="fourier", encoder_type="residual", resample_filter=[1, 3, 3, 1], channel_mult_noise=2, **SONG),
    "EDM-preconditioned U-Net": _physics("models.diffusion_unets.DhariwalUNet", 2, 3, 16, 16,
        others=(*TIME, ((2, 4), ("n", None))), img_resolution=16, in_channels=3, out_channels=3, label_dim=4,
        model_channels=32, channel_mult=[1, 2], num_blocks=1, attn_resolutions=[8]),
    "3-D diffusion U-Net": _physics("experimental.models.diffusion_unets.DiffusionUNet3D", 2, 2, 8, 12, 8,
        others=TIME, x_channels=2, num_levels=2, model_channels=8, channel_mult=[1, 2], num_blocks=1,
        attention_levels=[1], dtype=torch.float32),
    "Transolver": _physics("models.transolver.Transolver", *POINTS, dims=ON_POINTS, functional_dim=3, out_dim=2,
        embedding_dim=2, others=(((2, 48, 2), ON_POINTS),), use_te=False, **NARROW),
    "Transolver on a grid": _physics("models.transolver.Transolver", 2, 12, 16, 3, dims=("n", "h", "w", None),
        functional_dim=3, out_dim=2, structured_shape=(12, 16), unified_pos=True, ref=4, use_te=False, **NARROW),
    "FLARE": _physics("models.flare.FLARE", *POINTS, dims=ON_POINTS, functional_dim=3, out_dim=2, embedding_dim=2,
        others=(((2, 48, 2), ON_POINTS),), use_te=False, **NARROW),
    "GeoTransolver": _physics("models.geotransolver.GeoTransolver", *POINTS, dims=ON_POINTS, functional_dim=3,
        out_dim=2, others=(((2, 48, 3), ON_POINTS), ((2, 1, 4), ("n", None, None)), ((2, 48, 3), ON_POINTS)),
        geometry_dim=3, global_dim=4, use_te=False, **NARROW),
    "U-Net of PhysicsNeMo": _physics("models.unet.UNet", 2, 2, 8, 16, 16, in_channels=2, out_channels=2, model_depth=2,
        feature_map_channels=[4, 4, 8, 8], use_attn_gate=True, attn_decoder_feature_maps=[8, 8],
        attn_feature_map_channels=[4, 4], attn_intermediate_channels=4),
    "Pix2Pix": _physics("models.pix2pix.Pix2Pix", *MAPS, in_channels=3, out_channels=3, dimension=2,
        conv_layer_size=8, n_downsampling=2, n_blocks=2),
    "SRResNet, 3-D": _physics("models.srrn.SRResNet", 2, 1, 8, 10, 12, in_channels=1, out_channels=1,
        n_resid_blocks=2, conv_layer_size=4, scaling_factor=2),
    "Diffusion U-Net of MONAI": _monai("DiffusionModelUNet", 2, 1, 8, 12, 8, others=TIME, num_res_blocks=1,
        channels=(4, 8), attention_levels=(False, True), norm_num_groups=2, num_head_channels=4),
    "U-Net of diffusers": _diffusers("UNet2DModel", 2, 3, 16, 24, in_channels=3, out_channels=3,
        layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")),
}  # fmt: skip
"""Run on request only."""
