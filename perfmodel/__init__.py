"""Part of the ``distconv`` package; import it as ``distconv.perfmodel``.

What a training step costs, and which plan costs least: machines, traced graphs, predictions, strategies.

::

    cost         What a training step costs under a plan: time of each operation, and memory
    exploration  Parallelisations searched together: cuts, replicas, distributions within stages, schedules
    graph        A network as the planner sees it
    machine      What a machine can do: its links, its collectives, its compute; read from YAML or measured
    profiles     What each layer of a network takes: measured, predicted, or read from a file
    sparse       What sparse networks cost over grids, from the sites of an example: pairs count, not voxels
    stages       Cuts of a network into pipeline stages, and what stages cost
    strategy     Which plan is the fastest that fits: candidates, and the searches among them
"""

if __name__ != "distconv.perfmodel":
    raise ImportError(
        "import this package as distconv.perfmodel: under the bare name 'perfmodel' its classes would exist twice"
    )

from distconv.perfmodel.cost.assumptions import Settings
from distconv.perfmodel.cost.candidates import candidates
from distconv.perfmodel.cost.evaluation import LayerPrediction, Prediction, evaluate
from distconv.perfmodel.cost.operation_work import LocalCall, Work, register_cost
from distconv.perfmodel.exploration.choices import Exploration
from distconv.perfmodel.exploration.explore import explore
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from distconv.perfmodel.profiles.layer_timing import time_layers
from distconv.perfmodel.profiles.predicted_profile import predicted_profile
from distconv.perfmodel.stages.partition import Device, StagePartition, partition
from distconv.perfmodel.stages.stage_costs import stage_time
from distconv.perfmodel.strategy.selection import Strategy, select

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
