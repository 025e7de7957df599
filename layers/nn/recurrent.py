"""Recurrent layers, with samples and time split.

Ranks along the axis that splits the time hand the state on from one to the next; see ``distconv.layers.recurrent``.
"""

from __future__ import annotations

from functools import partial

from distconv.dispatch import implements
from distconv.layers.recurrent.cells import CELLS
from distconv.layers.recurrent.methods import Method
from distconv.layers.recurrent.stack import called

# Of torch's own modules, unmodified.
for _cell in CELLS.values():
    implements(_cell.function)(partial(called, _cell, Method.AUTO))
