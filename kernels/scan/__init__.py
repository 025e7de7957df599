"""Backpropagation as a parallel scan: many products at a time, on one rank or over ranks.

::

    accounting       Record of the products of a scan: kind, phase, level and FLOP
    algorithm        Algorithm 1: the modified Blelloch scan, complete, truncated at a level, or (at level 0) linear
    backpropagation  ``backpropagate``: one gradient through a chain of transposed Jacobians
    checks           Checks of the arguments: Jacobians that chain, of one dtype and device
    cost             Predicted time of each method, and the choice between them
    elements         The elements of a scan: affine maps g -> J g + s, one by one or stacked
    ranks            A scan over ranks: each keeps its own Jacobians
"""

from distconv.deprecation import former_names

from .accounting import Step, critical_path, recorded
from .algorithm import sweep_levels
from .backpropagation import backpropagate, explain
from .checks import Problem, Size
from .cost import SPEEDS, ScanPrediction, Speed, predict
from .elements import Identity

__all__ = [
    "SPEEDS",
    "Identity",
    "Problem",
    "ScanPrediction",
    "Size",
    "Speed",
    "Step",
    "backpropagate",
    "critical_path",
    "explain",
    "predict",
    "recorded",
    "sweep_levels",
]

__getattr__ = former_names(__name__, {"Prediction": "ScanPrediction", "critical": "critical_path"})
