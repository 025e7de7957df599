"""Backpropagation as a scan.

::

    accounting       What a scan computes, step by step: by vector or by matrix, in which phase and level, and its FLOP
    algorithm        Algorithm 1: the modified Blelloch scan, complete, truncated at a level, or linear
    backpropagation  Backpropagation of one gradient through a chain of transposed Jacobians
    elements         The elements of a scan: affine maps g -> J g + s, one by one or stacked
"""

from .accounting import Step, critical, recorded
from .algorithm import sweep_levels
from .backpropagation import backpropagate
from .elements import Identity

__all__ = ["Identity", "Step", "backpropagate", "critical", "recorded", "sweep_levels"]
