"""Splitting of a graph of steps into those of stages, each of which takes the result of the stage before."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from torch import fx, nn

from distconv.errors import DistconvError

COMPUTATIONS = ("call_module", "call_function", "call_method")
"""Kinds of nodes that belong to one stage. The other nodes are inputs, parameters, constants and the output."""

EXAMPLE = "pass an example of its input"
"""Suggested fix in messages."""

# Without an example, a node does not show the type of its value. These methods, functions and attributes of a tensor do
# not return a tensor; the functions return a tuple of tensors. See is_tensor.
PLAIN_METHODS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "item", "tolist", "stride"})
TUPLE_FUNCTIONS = frozenset({"chunk", "split", "tensor_split", "unbind"})
PLAIN_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "layout", "itemsize", "nbytes", "requires_grad"})
LOCAL_ATTRIBUTES = frozenset({"device", "layout"})
"""Attributes of a tensor that a stage cannot send."""


class SplitError(DistconvError, ValueError):
    """A model cannot be split, or not at this position."""


class ModuleCall(NamedTuple):
    """Call of a module.

    Attributes
    ----------
    name : str
        Full name.
    layer : bool
        True if the module is a convolution or linear layer, so that a register may follow it. Otherwise False.
    begin : int
        Position of the call in the list of steps.
    """

    name: str
    layer: bool
    begin: int


Locate = Callable[[list[ModuleCall], list[int]], list[int]]
"""Function that returns the split positions, from all calls and the positions that compute.

Split points are names or numbers of layers. Their positions differ between the recordings of a model.
"""


class ModelSteps(NamedTuple):
    """Steps of a model.

    Attributes
    ----------
    calls : list of ModuleCall
    computing : list of int
        Positions of steps that compute.
    build : callable
        Makes the stages for a :data:`Locate` function.
    possible : callable
        Returns True if the model can be split at a position.
    """

    calls: list[ModuleCall]
    computing: list[int]
    build: Callable[[Locate], list[nn.Module]]
    possible: Callable[[int], bool]


def computing_positions(graph: fx.Graph) -> list[int]:
    """Return the positions of the nodes that compute."""
    return [index for index, node in enumerate(graph.nodes) if node.op in COMPUTATIONS]


def cut_graph(graph: fx.Graph, positions: list[int]) -> list[fx.Graph]:
    """Return the graphs of the stages.

    Parameters
    ----------
    graph : Graph
        Steps of the model.
    positions : list of int
        Where the second stage, the third, and so on begin.

    Returns
    -------
    list of Graph
        Each graph takes what the one before returns.

    Raises
    ------
    SplitError
        If a device or layout crosses a split point, or two values that share memory do and one is written
        later.
    """
    nodes = list(graph.nodes)
    stage_of = _stages(nodes, positions)
    boundaries = [_live_values(nodes, stage_of, cut) for cut in range(len(positions))]
    pieces = [[node for node in nodes if stage_of.get(node) == index] for index in range(len(positions) + 1)]
    given_to = [[node for node in nodes if node.op == "placeholder"], *boundaries]
    return [_stage_graph(*piece) for piece in zip(pieces, given_to, [*boundaries, None], strict=True)]


def _stages(nodes: list[fx.Node], positions: list[int]) -> dict[fx.Node, int]:
    """Return the stage of each node, except parameters and constants, which belong to the stages that use them."""
    stages = {node: bisect_right(positions, index) for index, node in enumerate(nodes) if node.op in COMPUTATIONS}
    stages |= {node: 0 for node in nodes if node.op == "placeholder"}
    return stages | {node: len(positions) for node in nodes if node.op == "output"}


def cut_test(graph: fx.Graph, root: nn.Module) -> Callable[[int], bool]:
    """Return a function that returns True if a graph can be split at a position.

    Parameters
    ----------
    graph : Graph
    root : Module
        Owner of the graph's modules and weights.

    Returns
    -------
    callable
    """
    nodes = list(graph.nodes)
    index = {node: number for number, node in enumerate(nodes)}
    uses: dict[int, list[int]] = {id(tensor): [] for tensor in root.buffers()}
    for node in nodes:
        if node.op in ("call_module", "get_attr"):
            attribute = operator.attrgetter(str(node.target))(root)
            tensors = attribute.buffers() if isinstance(attribute, nn.Module) else [attribute]
            users = [node] if node.op == "call_module" else node.users
            for tensor in (tensor for tensor in tensors if id(tensor) in uses):
                uses[id(tensor)] += [index[user] for user in users]
    # A split between the first and the last use of a buffer would make two stages share it.
    ranges = [(min(each), max(each)) for each in uses.values() if each]

    def possible(position: int) -> bool:
        try:
            _live_values(nodes, _stages(nodes, [position]), 0)
        except SplitError:
            return False
        return not any(first < position <= last for first, last in ranges)

    return possible


def _live_values(nodes: list[fx.Node], stage_of: dict[fx.Node, int], cut: int) -> list[fx.Node]:
    """Return the values that are made before a split point and needed after it, the latest first."""
    # Parameters and constants have no stage. They belong to the stages that use them, and never cross a split point.
    alive = [
        node
        for node in nodes
        if stage_of.get(node, cut + 1) <= cut and any(stage_of[user] > cut for user in node.users)
    ]
    for node in alive:
        if node.target is getattr and node.args[1] in LOCAL_ATTRIBUTES:
            raise SplitError(
                f"'{node}' ({node.format_node()}) is a property of one rank, but would have to be sent from stage "
                f"{cut} to {cut + 1}; {EXAMPLE}, cut elsewhere, or read it from a tensor where it is used"
            )
    _check_memory(alive, [node for node in nodes if stage_of.get(node, cut) > cut], cut)
    return alive[::-1]  # the order is part of split()'s interface: the latest value first


def _check_memory(alive: list[fx.Node], after: list[fx.Node], cut: int) -> None:
    """Check that memory shared by values across a split point is not written later, where sharing is known.

    After the split they no longer share memory.
    """
    first: dict[int, fx.Node] = {}
    for node in (node for node in alive if "memory" in node.meta):
        other = first.setdefault(node.meta["memory"], node)
        if other is not node and any(node.meta["memory"] in later.meta.get("written", ()) for later in after):
            raise SplitError(
                f"'{other}' and '{node}' share memory that is written after the cut from stage {cut} to {cut + 1}; "
                "cut elsewhere"
            )


def is_tensor(node: fx.Node) -> bool:
    """Return True if the value of ``node`` is a tensor, as far as the graph shows."""
    if "like" in node.meta:
        return True
    if node.op in ("placeholder", "call_module", "get_attr"):
        return True
    if _is_tuple(node) or node.target is len or (node.op == "call_method" and node.target in PLAIN_METHODS):
        return False
    if node.target is getattr:
        return node.args[1] not in PLAIN_ATTRIBUTES
    if node.op == "call_function" and getattr(node.target, "__module__", None) in ("_operator", "builtins", "math"):
        return any(is_tensor(argument) or _is_tuple(argument) for argument in node.all_input_nodes)
    return True


def _is_tuple(node: fx.Node) -> bool:
    """Return True if a value is a tuple of tensors."""
    return getattr(node.target, "__name__", node.target) in TUPLE_FUNCTIONS


def _stage_graph(nodes: list[fx.Node], given: list[fx.Node], returned: list[fx.Node] | None) -> fx.Graph:
    """Return the graph that takes ``given`` and returns ``returned`` (None: the model's result)."""
    graph = fx.Graph()
    here: dict[fx.Node, fx.Node] = {}  # by node of the model's graph: the node of this stage's graph
    for node in given:
        here[node] = graph.placeholder(node.name)
        here[node].meta = node.meta

    def value(node: fx.Node) -> fx.Node:
        if node not in here:  # a parameter, a buffer or a constant of the stage that uses it
            here[node] = graph.create_node("get_attr", node.target)
        return here[node]

    for node in (node for node in nodes if node.op in COMPUTATIONS):
        here[node] = graph.node_copy(node, value)
    if returned is None:
        graph.output(fx.node.map_arg(nodes[-1].args[0], value)).meta = nodes[-1].meta
    else:
        values = tuple(value(node) for node in returned)
        # A single value that may be a tuple stays one argument of the next stage.
        graph.output(values[0] if len(values) == 1 and is_tensor(returned[0]) else values)
    return graph
