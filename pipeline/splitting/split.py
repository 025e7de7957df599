"""Cuts an unmodified model into the stages of a pipeline.

``torch.fx`` writes down what ``forward`` does with one input, or a run with an example shows it. The list is cut, and
each piece becomes a stage that talks to its neighbours only: a value that a later stage needs is passed on by all
stages between.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from .fx_graph import is_hooked, is_layer, traced_steps
from .graph_cuts import Locate, ModelSteps, ModuleCall, SplitError
from .recorded_stages import recorded_steps


def split(
    model: nn.Module, cuts: Sequence[str] | Sequence[int], example: torch.Tensor | None = None
) -> list[nn.Module]:
    """Stages that compute what ``model`` does: len(cuts) + 1 of them.

    A cut is the full dotted name of the submodule that begins the next stage, or a number k, a register behind layer k
    of the pipeline placement vector (stale weights, 4.1). Layers are modules Conv*, ConvTranspose*, SparseConv and
    Linear in the order of their calls, from 1; the 1x1 convolution of a shortcut counts like any other. What follows
    layer k up to layer k + 1 (batch norm, ReLU, the addition of a residual block) belongs to the earlier stage.

    The first stage takes the model's one input, every other what the stage before returns: a tensor, or a tuple of
    tensors (the latest first) where several values live across the cut. A stage returns the very object that it was
    given if it only passes it on. The last returns what the model returns.

    Stages hold the model's own parameters, buffers and submodules under the same names: to train them trains the model,
    and ``train()`` or ``eval()`` of a stage reaches them. An ``nn.Sequential`` that is cut at its children becomes
    several ``nn.Sequential``. Any other ``forward`` is read here, with a stand-in for the tensor: what it does besides
    computing (printing, counting in Python) happens now and never again.

    ``example`` (N, ...): a tensor like those that the model is to be trained with, whose elements do not matter. Where
    ``torch.fx`` does not get by without one, ``forward`` of a copy is recorded while it runs with an input of that
    shape, and again whenever a stage meets another number of samples or mode: decisions by shapes and modes are those
    of the model. Recomputation (``torch.utils.checkpoint``) gives the same numbers, but saves nothing then.

    Raises
    ------
    SplitError
        If a cut names no submodule, or one that is called more than once, if cuts are out of order or leave a stage
        empty; if ``torch.fx`` cannot follow ``forward`` and there is no ``example``, or its run cannot be recorded
        either; if two stages would share a parameter or a buffer, or if a value that is no tensor lives across a cut.

    Examples
    --------
    >>> [list(dict(stage.named_children())) for stage in split(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), ["1"])]
    [['0'], ['1']]
    """
    if not cuts:
        return [model]
    if _sliceable(model, cuts):
        return _stages(model, cuts, _children(model))
    try:
        return _stages(model, cuts, traced_steps(model))
    except SplitError:
        if example is None:
            raise
    return _stages(model, cuts, recorded_steps(model, example))


def possible_cuts(model: nn.Module, example: torch.Tensor | None = None) -> list[str]:
    """Names of the submodules at which :func:`split` can cut ``model``, alone or together, in the order of their calls.

    Of several that begin with the same computation it is the innermost.

    Raises
    ------
    SplitError
        If ``torch.fx`` cannot follow ``forward``, nor can it be recorded with an ``example``.

    Examples
    --------
    >>> possible_cuts(nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2))))
    ['1.0', '1.1']
    """
    try:
        steps = traced_steps(model)
    except SplitError:
        if example is None:
            raise
        steps = recorded_steps(model, example)
    times = Counter(call.name for call in steps.calls)
    cuts: dict[int, str] = {}
    for call in steps.calls:
        first = bisect_left(steps.computing, call.begin)
        if call.name and times[call.name] == 1 and 0 < first < len(steps.computing):
            cuts[first] = call.name
    return [name for first, name in sorted(cuts.items()) if steps.possible(steps.computing[first])]


def _stages(model: nn.Module, cuts: Sequence[str] | Sequence[int], steps: ModelSteps) -> list[nn.Module]:
    stages = steps.build(partial(_positions, cuts))
    _check_disjoint(model, stages)
    return stages


def _positions(cuts: Sequence[str] | Sequence[int], calls: list[ModuleCall], computing: list[int]) -> list[int]:
    """Where the stages behind all cuts begin."""
    positions = [_position(cut, calls) for cut in cuts]
    _check_order(cuts, [0, *positions], computing)
    return positions


def _sliceable(model: nn.Module, cuts: Sequence[str] | Sequence[int]) -> bool:
    if type(model).forward is not nn.Sequential.forward or is_hooked(model):
        return False
    children = model._modules  # named_children leaves out a child that comes a second time
    if all(isinstance(cut, str) for cut in cuts):
        return all(cut in children for cut in cuts)
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
    """Where the stage behind a cut begins."""
    if isinstance(cut, str):
        begins = [call.begin for call in calls if call.name == cut]
        if len(begins) > 1:
            raise SplitError(f"cut '{cut}': the module is called {len(begins)} times; name one that is called once")
        # A list of modules is not called itself.
        begins = begins or [call.begin for call in calls if call.name.startswith(f"{cut}.")][:1]
        if not begins:
            raise SplitError(f"cut '{cut}': no module of that name is called; there are {_names(calls)}")
        return begins[0]
    layers = [call for call in calls if call.layer]
    if not 1 <= cut < len(layers):
        numbered = [f"{number} {call.name}" for number, call in enumerate(layers, 1)]
        raise SplitError(
            f"cut {cut}: a register comes behind one of the layers 1 to {len(layers) - 1} of {len(layers)} "
            f"({_shortened(numbered)})"
        )
    return layers[cut].begin


def _names(calls: list[ModuleCall]) -> str:
    return _shortened(list(dict.fromkeys(call.name for call in calls if call.name)))


def _shortened(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 12 else [*names[:9], "...", *names[-2:]])


def _check_order(cuts: Sequence[str] | Sequence[int], begins: list[int], computing: list[int]) -> None:
    """``begins``: where each stage begins."""
    for index, (begin, end) in enumerate(pairwise([*begins, computing[-1] + 1])):
        if begin > end:
            raise SplitError(f"cuts {list(cuts)}: {cuts[index]!r} comes before {cuts[index - 1]!r} in the model")
        if not any(begin <= position < end for position in computing):
            raise SplitError(f"cuts {list(cuts)} leave stage {index} of {len(begins)} empty")


def _check_disjoint(model: nn.Module, stages: list[nn.Module]) -> None:
    """Each parameter and buffer has one owner: stages run on different ranks, where copies would drift apart."""
    owner: dict[int, int] = {}
    names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    for index, stage in enumerate(stages):
        for tensor in [*stage.parameters(), *stage.buffers()]:
            first = owner.setdefault(id(tensor), index)
            if first != index and id(tensor) in names:
                raise SplitError(
                    f"'{names[id(tensor)]}' is used by stages {first} and {index}; cut where one stage has all its uses"
                )
