"""What the packages of a user's own model take, weighed while it is built."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path

import torch

_weights: dict[str, int] = {}
"""Bytes by the name of the model: only the first building of one imports anything."""


def weighed(name: str, build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """The model ``name`` that ``build`` makes; :func:`packages_bytes` knows its packages' memory from then on."""
    if ":" not in name or name in _weights:
        return build()
    importlib.import_module("torch._dynamo")  # as the first optimizer of a training does; the packages may, too
    before = _resident_bytes()
    model = build()
    tensors = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    _weights[name] = max(0, _resident_bytes() - before - tensors)
    return model


def packages_bytes(name: str) -> int:
    """Memory that the packages of a model took, beyond what a training has anyway; 0 of a reference model."""
    return _weights.get(name, 0)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
