"""Part of the ``distconv`` package; import it as ``distconv.perfmodel``.

What a training step costs, and which plan costs least: machines, traced graphs, predictions, strategies.
"""

if __name__ != "distconv.perfmodel":
    raise ImportError(
        "import this package as distconv.perfmodel: under the bare name 'perfmodel' its classes would exist twice"
    )

from distconv.perfmodel.evaluation import LayerPrediction, Prediction, evaluate
from distconv.perfmodel.exploration import explore
from distconv.perfmodel.exploration_choices import Exploration
from distconv.perfmodel.graph import LayerGraph
from distconv.perfmodel.layer_profile import Layer, Profile
from distconv.perfmodel.layer_timing import time_layers
from distconv.perfmodel.machine import Machine
from distconv.perfmodel.partitioning import Device, StagePartition, partition
from distconv.perfmodel.plans import candidates
from distconv.perfmodel.predicted_profile import predicted_profile
from distconv.perfmodel.selection import Strategy, select
from distconv.perfmodel.settings import Settings
from distconv.perfmodel.stage_costs import stage_time
from distconv.perfmodel.tracing import trace
from distconv.perfmodel.work import LocalCall, Work, register_cost

__all__ = [
    "Device",
    "Exploration",
    "Layer",
    "LayerGraph",
    "LayerPrediction",
    "LocalCall",
    "Machine",
    "Prediction",
    "Profile",
    "Settings",
    "StagePartition",
    "Strategy",
    "Work",
    "candidates",
    "evaluate",
    "explore",
    "partition",
    "predicted_profile",
    "register_cost",
    "select",
    "stage_time",
    "time_layers",
    "trace",
]
