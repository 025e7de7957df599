"""What a model does, as a list of steps that can be cut: written down by ``torch.fx``."""

from __future__ import annotations

import operator
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from distconv.errors import DistconvError
from distconv.layers.sparse import SparseConv
from distconv.plan import decides

COMPUTATIONS = ("call_module", "call_function", "call_method")
PLAIN_METHODS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "item", "tolist", "stride"})
SEVERAL = frozenset({"chunk", "split", "tensor_split", "unbind"})
PLAIN_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "layout", "itemsize", "nbytes", "requires_grad"})


class SplitError(DistconvError, ValueError):
    """A model that cannot be cut, or not there."""


class Call(NamedTuple):
    """A module's call: its name, whether it is a layer, and where it begins in the list of steps."""

    name: str
    layer: bool
    begin: int


class Steps(NamedTuple):
    """What a model does: all calls, the positions that compute, and how to cut at given positions."""

    calls: list[Call]
    computing: list[int]
    build: Callable[[list[int]], list[nn.Module]]


class _OneInput(nn.Module):
    """``model`` of one argument; others keep their defaults. What tracing adds to the root does not reach the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x)


class _Tracer(fx.Tracer):
    """Notes where each module's call begins, and refuses what would be lost."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.modes = _modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # Sites depend on numbers, which torch.fx has not got.
        return (
            is_layer(m)
            or m.__module__.startswith("distconv.layers.sparse.")
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name = self.path_of_module(m)
        if is_hooked(m) and not self.is_leaf_module(m, name):
            raise SplitError("it has hooks, which torch.fx would call now and then never again")
        name = name.removeprefix("model").removeprefix(".")
        self.calls.append(Call(name, is_layer(m), len(self.graph.nodes)))
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:
            raise SplitError("it switches autograd or autocast on or off, and torch.fx does not write that down")
        return super().create_node(*args, **kwargs)


def is_layer(module: nn.Module) -> bool:
    """Whether ``module`` is a convolution or linear layer, behind which there may be a register."""
    return decides(module) or isinstance(module, SparseConv)


def is_hooked(module: nn.Module) -> bool:
    """Whether ``module`` has hooks, which a traced graph would lose."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(hooks)


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


def traced_steps(model: nn.Module) -> Steps:
    """What ``model`` does, in steps that can be cut; by ``torch.fx``."""
    tracer, root, graph = _trace(model)
    nodes = list(graph.nodes)
    computing = [index for index, node in enumerate(nodes) if node.op in COMPUTATIONS]

    def build(positions: list[int]) -> list[nn.Module]:
        stage_of = {nodes[index]: bisect_right(positions, index) for index in computing}
        stage_of |= {node: 0 for node in nodes if node.op == "placeholder"}
        stage_of |= {node: len(positions) for node in nodes if node.op == "output"}
        boundaries = [_alive(nodes, stage_of, cut) for cut in range(len(positions))]
        pieces = [[node for node in nodes if stage_of.get(node) == index] for index in range(len(positions) + 1)]
        given_to = [[node for node in nodes if node.op == "placeholder"], *boundaries]
        return [_stage(model, root, *piece) for piece in zip(pieces, given_to, [*boundaries, None], strict=True)]

    return Steps(tracer.calls, computing, build)


def _trace(model: nn.Module) -> tuple[_Tracer, nn.Module, fx.Graph]:
    """The steps of ``forward`` in training, which must be those in evaluation too: a stage has one list of them."""
    found = []
    with _modes_of_modules_kept(model):
        for training in (False, True):
            model.train(training)
            tracer, root = _Tracer(), _OneInput(model)
            try:
                found.append((tracer, root, tracer.trace(root)))
            except Exception as error:
                raise SplitError(_refusal(model, error)) from error
    (_, root, graph), (_, other_root, other) = found
    for a, b in zip_longest(graph.nodes, other.nodes):
        if a is None or b is None or a.format_node() != b.format_node() or not _same_constant(a, root, other_root):
            raise SplitError(
                f"{type(model).__name__}: forward does not always do the same (in train() and eval(), each time), from "
                f"'{a or b}' on ({(a or b).format_node()}); use modules (nn.Dropout, not F.dropout) that know the mode"
            )
    return found[-1]


def _same_constant(node: fx.Node, root: nn.Module, other: nn.Module) -> bool:
    """Whether a tensor that forward made without its input is no random one."""
    if node.op != "get_attr" or str(node.target).startswith("model."):
        return True
    one, two = _attribute(root, str(node.target)), _attribute(other, str(node.target))
    return not isinstance(one, torch.Tensor) or torch.equal(one, two)


@contextmanager
def _modes_of_modules_kept(model: nn.Module) -> Iterator[None]:
    kept = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in kept:
            module.training = training


def _refusal(model: nn.Module, error: Exception) -> str:
    """What in the model stops torch.fx: the last line of a traceback that is neither torch's nor ours."""
    ours = (str(Path(torch.__file__).parent), __file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    line = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else "its forward"
    reason = (str(error) or type(error).__name__).split(". ")[0]
    return (
        f"{type(model).__name__}: torch.fx cannot follow {line} ({reason}); "
        "make it an nn.Sequential, or write the list of stages by hand"
    )


def _alive(nodes: list[fx.Node], stage_of: dict[fx.Node, int], cut: int) -> list[fx.Node]:
    """The values made before a cut and needed behind it, the latest first."""
    alive = [
        node
        for node in nodes
        if stage_of.get(node, cut + 1) <= cut and any(stage_of[user] > cut for user in node.users)
    ]
    for node in alive:
        if not _is_tensor(node):
            raise SplitError(
                f"'{node}' ({node.format_node()}) is no tensor, but would have to go from stage {cut} to {cut + 1}; "
                "cut elsewhere, or compute it from a tensor where it is used"
            )
    return alive[::-1]


def _is_tensor(node: fx.Node) -> bool:
    if node.op in ("placeholder", "call_module", "get_attr"):
        return True
    if _is_several(node) or node.target is len or (node.op == "call_method" and node.target in PLAIN_METHODS):
        return False
    if node.target is getattr:
        return node.args[1] not in PLAIN_ATTRIBUTES
    if node.op == "call_function" and getattr(node.target, "__module__", None) in ("_operator", "builtins", "math"):
        return any(_is_tensor(argument) or _is_several(argument) for argument in node.all_input_nodes)
    return True


def _is_several(node: fx.Node) -> bool:
    """Whether a value is a tuple of tensors."""
    return getattr(node.target, "__name__", node.target) in SEVERAL


def _stage(
    model: nn.Module, root: nn.Module, nodes: list[fx.Node], given: list[fx.Node], returned: list[fx.Node] | None
) -> nn.Module:
    """The module that takes ``given`` and returns ``returned`` (None: what the model returns)."""
    graph = fx.Graph()
    here = {node: graph.placeholder(node.name) for node in given}
    attributes: dict[str, Any] = {}

    def value(node: fx.Node) -> fx.Node:
        if node not in here:  # a parameter, a buffer or a constant: of whichever stage uses it
            attributes[_name(node)] = _attribute(root, str(node.target))
            here[node] = graph.get_attr(_name(node))
        return here[node]

    for node in (node for node in nodes if node.op in COMPUTATIONS):
        here[node] = graph.node_copy(node, value)
        if node.op == "call_module":
            here[node].target = _name(node)
            attributes[_name(node)] = _attribute(root, str(node.target))
    if returned is None:
        graph.output(fx.node.map_arg(nodes[-1].args[0], value))
    else:
        values = tuple(value(node) for node in returned)
        graph.output(values[0] if len(values) == 1 else values)
    return _module(model, graph, attributes)


def _module(model: nn.Module, graph: fx.Graph, attributes: dict[str, Any]) -> nn.Module:
    stage = fx.GraphModule(attributes, graph, f"{type(model).__name__}Stage")
    stage.training = model.training
    saved = model.state_dict(keep_vars=True)
    for name, attribute in attributes.items():
        if isinstance(attribute, torch.Tensor) and name not in saved:
            owner, _, last = name.rpartition(".")
            stage.get_submodule(owner).register_buffer(last, attribute, persistent=False)
    return stage


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("model.")


def _attribute(root: nn.Module, target: str) -> Any:
    return operator.attrgetter(target)(root)
