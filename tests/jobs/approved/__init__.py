"""Approved printed text: each file ``NAME.txt`` in this folder is the whole output that a test expects.

python -m tests.jobs.approved      write the files again; read the difference before you commit it
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).parent
update = False
"""True writes the files instead of comparing them."""


def assert_approved(name: str, text: str) -> None:
    """Compare ``text`` with the approved one, line by line."""
    path = FOLDER / f"{name}.txt"
    found = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found)
    assert found.splitlines() == path.read_text().splitlines(), f"not as in {path}; see tests/jobs/approved"


def shape_of(value: torch.Tensor) -> str:
    """Return dtype and shape."""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def size_of(value: torch.Tensor) -> str:
    """Return dtype, shape and the sum of the absolute values; 0 if the sum is round-off of zeros."""
    size = value.detach().to(torch.complex128).abs().nan_to_num(posinf=0).sum().item()
    size = size if size > 1e-12 else 0.0
    return f"{shape_of(value)} {size:.4g}"


def weighted(values: object) -> str:
    """Return shape and sum of numbers, each of which has a weight of its own: their order matters."""
    array = np.asarray(values, np.float64)
    total = float((array.ravel() * np.cos(np.arange(array.size))).sum())
    return f"{list(array.shape)} {total:.5g}"


def assert_approved_defaults(name: str, *settings: Any) -> None:
    """Compare the own fields of settings, without those of their base classes."""
    lines = []
    for each in settings:
        own = type(each).__annotations__
        lines.append(f"{type(each).__name__}:")
        lines += [f"    {field.name} = {getattr(each, field.name)!r}" for field in fields(each) if field.name in own]
    assert_approved(f"settings/{name}", "\n".join(lines))
