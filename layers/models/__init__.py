"""Reference models. Ordinary torch modules: they know nothing of distribution, and nothing here imports distconv.

>>> sorted(MODELS)
['mesh1k', 'mesh2k', 'unet']
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from .mesh import mesh1k, mesh2k
from .unet import UNet, unet

MODELS: dict[str, Callable[..., nn.Module]] = {"mesh1k": mesh1k, "mesh2k": mesh2k, "unet": unet}
"""Factory of each model by its name; all take ``in_channels``, ``classes`` and ``width``."""

__all__ = ["MODELS", "UNet", "mesh1k", "mesh2k", "unet"]
