"""Stage boundaries that balance the work of a sparse network on a cloud."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from distconv.jobs.training.pipelines.stages import MACHINE, choose_split_points
from distconv.layers.sparse import SparseConv, SparseTensor
from distconv.perfmodel import Machine
from distconv.perfmodel.sparse.counted_profile import counted_profile
from distconv.perfmodel.sparse.recording import record


def balanced_cuts(model: nn.Module, x: SparseTensor, replicas: Sequence[int]) -> list[str]:
    """Return the layers at which to split a sparse network into stages of about equal time per replica.

    Parameters
    ----------
    model : Module
        The network.
    x : SparseTensor
        A micro-batch. Its sites and pairs are counted to estimate the time of each layer.
    replicas : sequence of int
        Number of replicas of each stage.

    Returns
    -------
    list of str
        First layer of the second and each later stage: convolution or linear layers.

    Raises
    ------
    SplitError
        If there are fewer such layers than stages.
    """
    if len(replicas) == 1:
        return []
    profile = counted_profile(record(model, x), Machine.load(MACHINE))
    modules = dict(model.named_modules())
    starts = [each.name for each in profile.layers if isinstance(modules.get(each.name), (SparseConv, nn.Linear))]
    return choose_split_points(profile, starts, replicas, type(model).__name__)
