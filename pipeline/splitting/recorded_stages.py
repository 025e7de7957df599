"""Stages of a model whose forward was recorded, for each number of samples and mode in use.

A recording contains plain numbers where the model read a shape, so it holds for one shape of the input and one mode of
each module. Another one is made when it is needed, so that no decision of the model by shape or mode is frozen.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_unflatten

from distconv.pipeline.stage.structures import call_arguments, count_samples

from .fx_graph import autograd_modes
from .graph_cuts import Locate, ModelSteps, SplitError, computing_positions, cut_graph, cut_test
from .recording import FakeModel, ForwardRecording, ModelInput, TensorExample, containers


def recorded_steps(model: nn.Module, example: Any) -> ModelSteps:
    """Return the steps of a model with an input like ``example``.

    Parameters
    ----------
    model : Module
    example : object
        Input (N, ...), or several as of :meth:`Pipeline.step`.

    Returns
    -------
    ModelSteps

    Raises
    ------
    SplitError
        If its forward cannot be recorded, or differs from run to run.
    """
    count_samples("split", example=example)
    like, _ = ModelInput.from_arguments(*call_arguments(model, example))
    blueprint = FakeModel(model)
    whole = _FullModel(model)
    training, evaluation = ((mode,) * len(whole.containers) for mode in (True, False))
    now, again = blueprint.record(like, training), blueprint.record(like, training)
    _check_same(model, now.graph, again.graph)
    recorded = [(training, now)]
    with suppress(SplitError):  # without it stages can still be trained
        recorded.append((evaluation, blueprint.record(like, evaluation)))

    def build(locate: Locate) -> list[nn.Module]:
        programs = StageProgramCache(blueprint, like, locate)
        examples = [programs.add(*recorded[0])]
        with suppress(SplitError):
            examples += [programs.add(*each) for each in recorded[1:]]
        pieces = zip(*examples, strict=True)
        return [RecordedStage(whole, programs, index, of_stage) for index, of_stage in enumerate(pieces)]

    return ModelSteps(now.calls, computing_positions(now.graph), build, cut_test(now.graph, model))


class StageProgramCache:
    """Steps of each stage, for all shapes and modes in use.

    ``_known`` has the steps of all stages by the number of samples, the modes of the modules whose forward is recorded,
    and autograd's modes. All stages of a model share one cache, and so do copies of a stage.
    """

    def __init__(self, blueprint: FakeModel, example: ModelInput, locate: Locate) -> None:
        self.example = example
        self._blueprint, self._locate = blueprint, locate
        self._known: dict[Any, list[StageProgram]] = {}  # never freed: few numbers of samples and modes are in use

    def __deepcopy__(self, memo: object) -> StageProgramCache:
        return self

    def add(
        self, training: tuple[bool, ...], recording: ForwardRecording, samples: int | None = None
    ) -> list[StageProgram]:
        """Return the steps of the stages from a recording, and store them for ``samples`` (None: the example's).

        Parameters
        ----------
        training : tuple of bool
            Modes of the modules whose forward is recorded.
        recording : ForwardRecording
            Steps of the full model.
        samples : int, optional
            Number of samples. Default: that of the example.

        Returns
        -------
        list of StageProgram
            One for each stage.
        """
        graph, calls = recording
        stage_graphs = cut_graph(graph, self._locate(calls, computing_positions(graph)))
        key = samples or self.example.samples, training, autograd_modes()
        self._known[key] = [StageProgram(stage_graph) for stage_graph in stage_graphs]
        return self._known[key]

    def find(self, index: int, given: Sequence[torch.Tensor], training: tuple[bool, ...]) -> StageProgram:
        """Return the steps of a stage for its inputs.

        Parameters
        ----------
        index : int
            The stage.
        given : sequence of Tensor
            Its inputs.
        training : tuple of bool
            Modes of the modules whose forward is recorded.

        Returns
        -------
        StageProgram

        Raises
        ------
        SplitError
            If no number of samples of the example's shape leads to these inputs.
        """
        likes = [TensorExample.from_tensor(tensor) for tensor in given]
        for samples in self._numbers_of_samples(index, likes, training):
            program = self._programs_of(samples, training)[index]
            if program.given == likes:
                return program
        raise SplitError(
            f"stage {index} received {_format_specs(likes)}; with samples like the example's "
            f"{_format_specs(self.example.tensors)} it receives "
            f"{_format_specs(self._programs_of(self.example.samples, training)[index].given)}, or another number of "
            "samples; split the model with an example of the shape, type and device that it is trained with"
        )

    def _programs_of(self, samples: int, training: tuple[bool, ...]) -> list[StageProgram]:
        programs = self._known.get((samples, training, autograd_modes()))
        if programs is not None:
            return programs
        recording = self._blueprint.record(self.example.with_samples(samples), training)
        return self.add(training, recording, samples)

    def _numbers_of_samples(self, index: int, likes: list[TensorExample], training: tuple[bool, ...]) -> Iterator[int]:
        """Yield the possible numbers of samples, from dimensions that are multiples of the example's."""
        samples, numbers = self.example.samples, dict[int, None]()
        for recorded, like in zip(self._programs_of(samples, training)[index].given, likes, strict=False):
            for example, extent in zip(recorded.shape, like.shape, strict=False):
                if example and example % samples == 0 and extent % (example // samples) == 0:
                    numbers.setdefault(extent // (example // samples))
        yield from numbers


class StageProgram:
    """Steps of one stage, for given shapes.

    ``given`` has the inputs for which the steps hold. ``inside`` has the names of the modules whose own forward was
    recorded in this stage. ``_done`` has the values that each step is the last to use, so that they are freed after it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.given: list[TensorExample] = [node.meta["like"] for node in self.nodes if node.op == "placeholder"]
        self.inside: set[str] = {node.meta["inside"] for node in self.nodes if "inside" in node.meta}
        # Later uses replace earlier ones. A value that no step uses is freed after its own step.
        last = {used: node for node in self.nodes for used in (node, *node.all_input_nodes)}
        self._done: dict[fx.Node, list[fx.Node]] = {}
        for node, user in last.items():
            self._done.setdefault(user, []).append(node)

    def names(self) -> list[str]:
        """Return the modules, parameters and buffers in use, in the order of their use."""
        return [str(node.target) for node in self.nodes if node.op in ("call_module", "get_attr")]

    def run(self, stage: nn.Module, given: Sequence[torch.Tensor]) -> Any:
        """Return the result of a stage for its inputs.

        Parameters
        ----------
        stage : nn.Module
            Owner of the modules, parameters and buffers.
        given : sequence of Tensor
            Inputs of the stage.

        Returns
        -------
        object
            A tensor, or a tuple of tensors.
        """
        values: dict[fx.Node, Any] = {}
        inputs = iter(given)
        *steps, output = self.nodes
        for node in steps:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "get_attr":
                values[node] = _attribute(stage, node)
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                function: Any = _attribute(stage, node) if node.op == "call_module" else node.target
                with torch.set_grad_enabled(node.meta["grad"]):
                    values[node] = function(*args, **kwargs)
            for done in self._done.get(node, ()):
                del values[done]
        result = fx.node.map_arg(output.args[0], values.__getitem__)
        return tree_unflatten(result, output.meta["form"]) if "form" in output.meta else result


class _FullModel:
    """A model, its modules, and the names of its saved state."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modules, self.containers = model, dict(model.named_modules()), containers(model)
        self.saved = model.state_dict(keep_vars=True).keys()


class RecordedStage(nn.Module):
    """Stage that runs recorded steps, with the modules and weights that they use."""

    def __init__(
        self, whole: _FullModel, programs: StageProgramCache, index: int, examples: Sequence[StageProgram]
    ) -> None:
        super().__init__()
        self.training = whole.model.training
        self._programs, self._index = programs, index
        self._containers = whole.containers  # in a list, so that their weights are not registered here
        inside = dict.fromkeys(name for program in examples for name in program.inside)
        self.recorded_modules = [whole.modules[name] for name in inside]
        """Modules of the model whose own forward runs in this stage; ``train()`` sets their mode."""
        if index == 0:
            self.__signature__ = inspect.signature(whole.model.forward)
        for name in dict.fromkeys(name for program in examples for name in program.names()):
            _assign(self, name, operator.attrgetter(name)(whole.model), name in whole.saved)

    def forward(self, *given: Any, **keywords: Any) -> Any:
        """Run the steps of the model between two split points. The first stage takes the arguments of the model.

        Raises
        ------
        SplitError
            If the first stage receives another structure than that of the example.
        """
        if self._index == 0:
            found, tensors = ModelInput.from_arguments(given, keywords)
            if found.structure != self._programs.example.structure:
                raise SplitError(
                    f"stage 0 received other containers, names or constants than the example: {found.structure}, not "
                    f"{self._programs.example.structure}; split the model with an example like the input"
                )
            given = tuple(tensors)
        training = tuple(module.training for module in self._containers)
        return self._programs.find(self._index, given, training).run(self, given)

    def train(self, mode: bool = True) -> RecordedStage:
        """Set the mode of the stage's modules, and of the modules whose forward was recorded in this stage."""
        super().train(mode)
        for module in self.recorded_modules:
            module.training = mode
        return self


def _assign(stage: nn.Module, name: str, value: Any, saved: bool) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in stage._modules:
            stage.add_module(part, nn.Module())
        stage = stage.get_submodule(part)
    # As in the model, tensors outside its saved state (buffers with persistent=False, plain attributes) are not saved.
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not hasattr(stage, last):
        stage.register_buffer(last, value, persistent=saved)
    elif getattr(stage, last, None) is not value:
        setattr(stage, last, value)


def _attribute(stage: nn.Module, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(stage)


def _check_same(model: nn.Module, graph: fx.Graph, again: fx.Graph) -> None:
    for a, b in zip_longest(graph.nodes, again.nodes):
        if (
            a is None
            or b is None
            or not _is_same((a.op, a.target, a.args, a.kwargs), (b.op, b.target, b.args, b.kwargs))
        ):
            raise SplitError(
                f"{type(model).__name__}: forward does not run the same operations each time, from '{a or b}' on; "
                "draw random numbers with torch, and keep state between calls in buffers only"
            )


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_is_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if callable(a) and callable(b):
        return getattr(a, "__name__", type(a)) == getattr(b, "__name__", type(b))
    return repr(a) == repr(b)  # by name for nodes; NaN equals itself


def _format_specs(likes: Sequence[TensorExample]) -> str:
    return ", ".join(f"{like.shape} {like.dtype} on {like.device}" for like in likes)
