"""Where the work that a sparse network does on a cloud cuts it into equal stages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from distconv.jobs.training.pipelines.stages import MACHINE, cuts_of
from distconv.layers.sparse import SparseConv, SparseTensor
from distconv.perfmodel import Machine
from distconv.perfmodel.sparse.counted_profile import counted_profile
from distconv.perfmodel.sparse.recording import record


def balanced_cuts(model: nn.Module, x: SparseTensor, replicas: Sequence[int]) -> list[str]:
    """The layers that begin the second part, the third, ...: ``len(replicas)`` parts of about equal time per replica.

    ``x`` is a micro-batch, whose sites and pairs are counted; the cuts are between convolution and linear layers.

    Raises
    ------
    SplitError
        If there are fewer such layers than parts.
    """
    if len(replicas) == 1:
        return []
    profile = counted_profile(record(model, x), Machine.load(MACHINE))
    modules = dict(model.named_modules())
    starts = [each.name for each in profile.layers if isinstance(modules.get(each.name), (SparseConv, nn.Linear))]
    return cuts_of(profile, starts, replicas, type(model).__name__)
