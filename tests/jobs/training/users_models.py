"""Models of a user, right and wrong ones, in a module that Python does not know yet."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.images.image_files import written

NETS = '''
"""Models of a user."""
from torch import nn
import torch

number = 3

def build(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, num_classes))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 10, 28)

    def forward(self, x):
        return self.conv(x).flatten(1)

def cells(in_channels, classes):
    return nn.Conv2d(in_channels, classes, 1)

def text():
    return "a model"

def fails():
    raise KeyError("no such\\nlayer")

def leaves():
    raise SystemExit(3)

def few():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 4))

def wants(depth):
    return Net()
'''


@pytest.fixture
def users_folder(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with MNIST and a module ``users_nets`` that Python does not know yet."""
    written(comm, shared_tmp_path, lambda folder: (folder / "users_nets.py").write_text(NETS) and None)
    written(comm, shared_tmp_path, lambda folder: (folder / "broken_nets.py").write_text("import nowhere") and None)
    monkeypatch.chdir(shared_tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("users_nets", "broken_nets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return written(comm, shared_tmp_path)
