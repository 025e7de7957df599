"""Recurrent layers, with samples and time split.

Ranks along the axis that splits the time hand the state on from one to the next; see ``distconv.layers.recurrent``.
"""

from __future__ import annotations

from typing import Any

import torch

from distconv.dispatch import Operator, Order, implements
from distconv.layers.recurrent.cells import CELLS, Cell
from distconv.layers.recurrent.methods import Method
from distconv.layers.recurrent.stack import called


def _operator(cell: Cell) -> Operator:
    def operator(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return called(cell, Method.AUTO, *args)

    return operator


for _cell in CELLS.values():
    implements(_cell.function, order=Order.NEW, tensors=None, passes=None)(_operator(_cell))
