"""Memory of the packages that a user's model imports, measured while the model is built.

The planning commands add it to the memory of a process on a CPU.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path

import torch

_package_bytes: dict[str, int] = {}
"""Bytes by the model's name, kept since only the first construction of a model imports its packages."""


def build_and_measure(name: str, build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Build a model and record the memory of its packages for :func:`packages_bytes`.

    Parameters
    ----------
    name : str
        A reference model, of which nothing is recorded, or ``package.module:factory``.
    build : callable
        Builds the model.

    Returns
    -------
    torch.nn.Module
        The model.
    """
    if ":" not in name or name in _package_bytes:
        return build()
    importlib.import_module("torch._dynamo")  # as the first optimizer of a training does; the packages may, too
    before = _resident_bytes()
    model = build()
    tensors = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    _package_bytes[name] = max(0, _resident_bytes() - before - tensors)
    return model


def packages_bytes(name: str) -> int:
    """Return the bytes of a model's packages beyond those of every training; 0 for a reference model."""
    return _package_bytes.get(name, 0)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
