"""Nodes of autograd's graph as users of ``grad_fn`` meet them: hooks on them see whole gradients, never blocks.

The graph is that of the blocks, and its nodes are not those of one process: which gradients go *into* a node's
operands is known for a leaf and for a layer's own hooks, and else nobody's to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from distconv.errors import UnsupportedOperation

BlockLayout = Any
"""How a gradient is split: what ``DistTensor`` takes beside the block; None for a plain tensor."""

_LEAF = "_distconv_leaf"


class BlockConverter:
    """Wraps blocks of gradients as DistTensors, and takes the blocks of what comes back."""

    def __init__(
        self,
        wrap: Callable[[torch.Tensor, BlockLayout], torch.Tensor],
        block: Callable[[Any, BlockLayout], torch.Tensor],
    ) -> None:
        self.wrap, self.block = wrap, block

    def to_global(self, blocks: Sequence[torch.Tensor | None], layouts: Sequence[BlockLayout]) -> tuple[Any, ...]:
        """The gradients of which these are blocks."""
        pairs = zip(blocks, layouts, strict=True)
        return tuple(b if b is None or layout is None else self.wrap(b, layout) for b, layout in pairs)

    def to_blocks(self, answer: Any, layouts: Sequence[BlockLayout]) -> Any:
        """The blocks of what a hook returned, or None if that was nothing."""
        if answer is None:
            return None
        answer = answer if isinstance(answer, tuple) else (answer,)
        pairs = zip(answer, layouts, strict=True)
        return tuple(a if a is None or layout is None else self.block(a, layout) for a, layout in pairs)


class _Unknown(Sequence[Any]):
    """The gradients of a node's operands, which belong to steps that one process does not have."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        raise UnsupportedOperation(
            "grad_input in a hook on a distributed tensor's grad_fn (register_hook, Module.register_backward_hook): "
            "its steps are not those of one process; use register_full_backward_hook, or x.register_hook on the operand"
        )


def mark_leaf(local: torch.Tensor, layout: BlockLayout) -> None:
    """Note that ``local`` is the block of a distributed leaf of ``layout``."""
    setattr(local, _LEAF, layout)


class GradFn:
    """The node that made a DistTensor's block; all but its hooks and neighbours is the node's own."""

    def __init__(self, node: Node, layout: BlockLayout, layouts: BlockConverter) -> None:
        self._node, self._layout, self._layouts = node, layout, layouts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        return self._node is (other._node if isinstance(other, GradFn) else other)

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return repr(self._node)

    def __call__(self, *_: Any) -> None:
        """Nothing that one process has.

        Raises
        ------
        UnsupportedOperation
            Always.
        """
        raise UnsupportedOperation(
            "grad_fn of a DistTensor, called with a gradient: its steps are not those of one process; use "
            "torch.autograd.grad(y, x, gradient)"
        )

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """The nodes behind this one."""
        return tuple((self._neighbour(node), number) for node, number in self._node.next_functions)

    def _neighbour(self, node: Node | None) -> Any:
        leaf = getattr(node, "variable", None)
        layout = getattr(leaf, _LEAF, None)
        # A plain leaf's node is its own.
        return node if node is None or (leaf is not None and layout is None) else GradFn(node, layout, self._layouts)

    def register_prehook(self, hook: Callable[[tuple[Any, ...]], Any]) -> Any:
        """Call ``hook`` with the gradient of the node's result; what it returns replaces that."""
        only = self._only("register_prehook")
        layouts = self._layouts
        return self._node.register_prehook(
            lambda blocks: layouts.to_blocks(hook(layouts.to_global(blocks, only)), only)
        )

    def register_hook(self, hook: Callable[[Any, tuple[Any, ...]], Any]) -> Any:
        """Call ``hook`` with the gradient of the node's result, once the node has run."""
        only = self._only("register_hook")

        def call(grad_inputs: Sequence[Any], grad_outputs: Sequence[Any]) -> None:
            unknown = _Unknown(len(grad_inputs)) if grad_inputs else ()
            if hook(unknown, self._layouts.to_global(grad_outputs, only)) is not None:
                raise UnsupportedOperation(
                    "a hook on a distributed tensor's grad_fn (register_hook, Module.register_backward_hook) that "
                    "returns other gradients: use register_full_backward_hook, or x.register_hook on the operand"
                )

        return self._node.register_hook(call)

    def _only(self, method: str) -> tuple[BlockLayout]:
        if self._layout is None or len(self._node._input_metadata) != 1:
            raise UnsupportedOperation(
                f"{method} on {self._node.name()}, a step of the distributed graph that has no tensor of one process "
                "(or several) for its result: use register_hook on the tensor"
            )
        return (self._layout,)
