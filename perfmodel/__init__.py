"""Part of the ``distconv`` package; import it as ``distconv.perfmodel``.

Performance model: it predicts what a training step costs, and finds the best plan.

:func:`trace` records a network, :class:`Machine` describes the hardware, :func:`evaluate` predicts time and memory of a
plan, and :func:`select` finds the best one. :func:`partition` and :func:`explore` do so for pipelines. Users and the
command line call these functions. The layers of distconv do not depend on this package.

Four terms occur everywhere. A *deciding layer* is a convolution or linear layer, for which a plan chooses a process
grid; every other operation inherits the grid of its first input. A *candidate* is one grid that a deciding layer may
have, written as the number of parts along each axis. A *strategy* is one candidate for each deciding layer. A *profile*
lists the times and sizes of a network's layers, from which pipelines are partitioned.

FP, BPx, BPw and BPa are the names of Dryden et al. 2019 for forward, backward-data, backward-weights and the gradient
all-reduce.

::

    cost         Cost of a training step under a plan: time of each operation, and memory
    exploration  Joint search over split points, replicas, distributions within stages, and schedules
    graph        Layer graph of a network, recorded from one run
    machine      Machine models: links, collectives and compute, read from YAML or measured
    profiles     Layer profiles: times and sizes, measured, predicted or read from a file
    sparse       Cost of sparse networks over process grids, counted from the sites of an example
    stages       Partition of a network into pipeline stages, and the cost of stages
    strategy     Search for the fastest plan that fits into memory
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
