"""Backpropagation as a scan: many products at a time instead of one after another, on one rank or over ranks.

::

    accounting       What a scan computes, step by step: by vector or by matrix, in which phase and level, and its FLOP
    algorithm        Algorithm 1: the modified Blelloch scan, complete, truncated at a level, or (at level 0) linear
    backpropagation  ``backpropagate``: one gradient through a chain of transposed Jacobians
    checks           What a scan can take: Jacobians that chain, of one dtype and device
    cost             What each method takes, predicted, and the choice between them
    elements         The elements of a scan: affine maps g -> J g + s, one by one or stacked
    ranks            A scan over ranks: each keeps its own Jacobians
"""

from .accounting import Step, critical_path, record_steps
from .algorithm import sweep_levels
from .backpropagation import backpropagate, explain
from .checks import Problem, Size
from .cost import SPEEDS, Prediction, Speed, predict
from .elements import Identity

__all__ = [
    "SPEEDS",
    "Identity",
    "Prediction",
    "Problem",
    "Size",
    "Speed",
    "Step",
    "backpropagate",
    "critical_path",
    "explain",
    "predict",
    "record_steps",
    "sweep_levels",
]
