"""``split``: the stages of an unmodified model, and the possible split points.

``torch.fx`` traces the steps of ``forward`` with one input. If it cannot, a run with an example records them. The list
is split, and each piece becomes a stage that communicates with its neighbours only: intermediate stages pass on the
values that later stages need.

Source: Zhang, Abdelrahman 2021 (stale weights), 4.1 (pipeline placement vector).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from .fx_graph import has_hooks, is_layer, trace_steps
from .graph_cuts import Locate, ModelSteps, ModuleCall, SplitError
from .recorded_stages import recorded_steps


def split(model: nn.Module, cuts: Sequence[str] | Sequence[int], example: Any = None) -> list[nn.Module]:
    """Split a model into ``len(cuts) + 1`` stages that compute the same as the model.

    The first stage takes the model's input. Every other stage takes the result of the stage before: a value, or a tuple
    of values (the latest first) if several are needed after the split. A stage that only passes a value on returns the
    same object. The last stage returns the model's result.

    Stages hold the model's own parameters, buffers and submodules under the same names, and may share parameters.
    Training the stages trains the model, and ``train()`` or ``eval()`` of a stage reaches its modules. An
    ``nn.Sequential`` that is split at its children becomes several ``nn.Sequential``.

    Source: Zhang, Abdelrahman 2021 (stale weights), 4.1 (registers by number of layer).

    Parameters
    ----------
    model : Module
        Model with one input, or with several that ``example`` gives.
    cuts : sequence of str or int
        Split points in order: the full name of the submodule that begins the next stage, or k for a register after
        layer k of the pipeline placement vector. Layers are modules Conv*, ConvTranspose*, SparseConv and Linear in the
        order of their calls, counted from 1; the 1x1 convolution of a shortcut is one of them. Other operations between
        layers k and k + 1 (batch norm, ReLU, the addition of a residual block) belong to the earlier stage.
    example : object, optional
        Tensor (N, ...) with the shape, dtype and device of training inputs, or a tuple or dictionary of inputs as for
        :meth:`Pipeline.step`. If ``torch.fx`` fails, or if there are several inputs, a copy of the model is recorded
        with it, and again when a stage receives another number of samples or mode, so that decisions by shape and mode
        are the model's.

    Returns
    -------
    list of Module
        The stages.

    Raises
    ------
    SplitError
        If a split point names no submodule or one that is called more than once, if split points are out of order or
        leave a stage empty; if ``forward`` can be neither traced nor recorded; if two stages would share a buffer, or
        if a device would cross a split point.

    Warnings
    --------
    Side effects of ``forward`` other than computation (printing, counting in Python) happen once, while the model is
    split, and never again. Recomputation (``torch.utils.checkpoint``) in a recorded model gives the same results but
    saves no memory.

    Examples
    --------
    >>> [list(dict(stage.named_children())) for stage in split(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), ["1"])]
    [['0'], ['1']]
    """
    if not cuts:
        return [model]
    if _sliceable(model, cuts):
        return _stages(model, cuts, _children(model))
    return _stages(model, cuts, _steps(model, example))


def possible_cuts(model: nn.Module, example: Any = None) -> list[str]:
    """Return the submodules at which :func:`split` can split a model, alone or together.

    If several submodules begin with the same computation, the innermost one is returned.

    Parameters
    ----------
    model : Module
    example : object, optional
        As in :func:`split`.

    Returns
    -------
    list of str
        Full names, in the order of their calls.

    Raises
    ------
    SplitError
        If ``forward`` can be neither traced nor recorded.

    Examples
    --------
    >>> possible_cuts(nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2))))
    ['1.0', '1.1']
    """
    steps = _steps(model, example)
    times = Counter(call.name for call in steps.calls)
    cuts: dict[int, str] = {}
    for call in steps.calls:
        first = bisect_left(steps.computing, call.begin)
        if call.name and times[call.name] == 1 and 0 < first < len(steps.computing):
            cuts[first] = call.name  # an inner module is called later than the modules around it, and replaces them
    return [name for first, name in sorted(cuts.items()) if steps.possible(steps.computing[first])]


def _steps(model: nn.Module, example: Any) -> ModelSteps:
    # A trace first: it needs no example, and holds for all numbers of samples.
    if example is None or isinstance(example, torch.Tensor):
        try:
            return trace_steps(model)
        except SplitError:
            if example is None:
                raise
    return recorded_steps(model, example)


def _stages(model: nn.Module, cuts: Sequence[str] | Sequence[int], steps: ModelSteps) -> list[nn.Module]:
    stages = steps.build(partial(_positions, cuts))
    _check_disjoint(model, stages)
    return stages


def _positions(cuts: Sequence[str] | Sequence[int], calls: list[ModuleCall], computing: list[int]) -> list[int]:
    """Return where the stages after all split points begin. Stages are in order, and not empty."""
    positions = [_position(cut, calls) for cut in cuts]
    begins, end_of_last = [0, *positions], computing[-1] + 1
    for index, (begin, end) in enumerate(pairwise([*begins, end_of_last])):
        if begin > end:
            raise SplitError(f"cuts {list(cuts)}: {cuts[index]!r} comes before {cuts[index - 1]!r} in the model")
        if not any(begin <= position < end for position in computing):
            raise SplitError(f"cuts {list(cuts)} leave stage {index} of {len(begins)} empty")
    return positions


def _sliceable(model: nn.Module, cuts: Sequence[str] | Sequence[int]) -> bool:
    """Return True if the model is an nn.Sequential that can be split at its children, without a trace."""
    if type(model).forward is not nn.Sequential.forward or has_hooks(model):
        return False
    children = model._modules  # named_children omits a child that occurs a second time
    if all(isinstance(cut, str) for cut in cuts):
        return all(cut in children for cut in cuts)
    # Numbers count layers, so a layer inside a child would lie between two children.
    inner = (inside for child in children.values() if child for inside in child.modules() if inside is not child)
    return not any(isinstance(cut, str) for cut in cuts) and not any(is_layer(module) for module in inner)


def _children(model: nn.Module) -> ModelSteps:
    children = [(name, child) for name, child in model._modules.items() if child is not None]
    calls = [ModuleCall(name, is_layer(child), index) for index, (name, child) in enumerate(children)]

    def build(locate: Locate) -> list[nn.Module]:
        cuts = locate(calls, list(range(len(children))))
        pieces = [children[begin:end] for begin, end in pairwise([0, *cuts, len(children)])]
        stages: list[nn.Module] = [nn.Sequential(OrderedDict(piece)) for piece in pieces]
        for stage in stages:
            stage.training = model.training
        return stages

    return ModelSteps(calls, list(range(len(children))), build, lambda position: True)


def _position(cut: str | int, calls: list[ModuleCall]) -> int:
    """Return where the stage after a split point begins."""
    if isinstance(cut, str):
        begins = [call.begin for call in calls if call.name == cut]
        if len(begins) > 1:
            raise SplitError(f"cut '{cut}': the module is called {len(begins)} times; name one that is called once")
        # A ModuleList is not called itself, only its children are.
        begins = begins or [call.begin for call in calls if call.name.startswith(f"{cut}.")][:1]
        if not begins:
            names = _shorten_names(list(dict.fromkeys(call.name for call in calls if call.name)))
            raise SplitError(f"cut '{cut}': no module of that name is called; there are {names}")
        return begins[0]
    layers = [call for call in calls if call.layer]
    if not 1 <= cut < len(layers):
        numbered = [f"{number} {call.name}" for number, call in enumerate(layers, 1)]
        raise SplitError(
            f"cut {cut}: a register must come after one of the layers 1 to {len(layers) - 1} of {len(layers)} "
            f"({_shorten_names(numbered)})"
        )
    return layers[cut].begin


def _shorten_names(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 12 else [*names[:9], "...", *names[-2:]])


def _check_disjoint(model: nn.Module, stages: list[nn.Module]) -> None:
    """Check that each buffer has one owner. Copies on the ranks of several stages would diverge."""
    owner: dict[int, int] = {}
    # Constants that forward makes are not named here: two stages may both have them.
    names = {id(tensor): name for name, tensor in model.named_buffers()}
    for index, stage in enumerate(stages):
        for tensor in stage.buffers():
            first = owner.setdefault(id(tensor), index)
            if first != index and id(tensor) in names:
                raise SplitError(
                    f"'{names[id(tensor)]}' is used by stages {first} and {index}; cut where one stage has all its uses"
                )
