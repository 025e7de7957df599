"""Runs every test on another device: tensors and modules that name none are made there."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors


class OnDevice(TorchFunctionMode):
    """``torch.set_default_device`` that also takes generators of the CPU: the numbers stay those that the CPU draws."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._constructors = _device_constructors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in self._constructors or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs, device="cpu").to(self.device)
        return func(*args, **{**kwargs, "device": self.device})
