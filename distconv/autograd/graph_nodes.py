"""``grad_fn`` of a DistTensor: a node of autograd's graph whose hooks get full gradients and never blocks.

The graph is recorded for blocks, and its nodes are not those of a single process. So the gradient of a node's result is
known, but not those of its operands, except for a leaf and for the full backward hooks of a module. Reading the unknown
ones raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from distconv.errors import UnsupportedOperation

BlockLayout = Any
"""How a gradient is split: the distribution and the shape of a DistTensor; None for a plain tensor."""

_LEAF = "_distconv_leaf"


class BlockConverter:
    """Conversion between blocks of gradients and DistTensors.

    Parameters
    ----------
    wrap : callable
        Makes a DistTensor of a block and a layout.
    block : callable
        Returns the block of a gradient under a layout.
    """

    def __init__(
        self,
        wrap: Callable[[torch.Tensor, BlockLayout], torch.Tensor],
        block: Callable[[Any, BlockLayout], torch.Tensor],
    ) -> None:
        self.wrap, self.block = wrap, block

    def to_global(self, blocks: Sequence[torch.Tensor | None], layouts: Sequence[BlockLayout]) -> tuple[Any, ...]:
        """Return the gradients whose blocks are given.

        Parameters
        ----------
        blocks : sequence of (Tensor or None)
            Blocks of gradients.
        layouts : sequence of BlockLayout
            One for each block.

        Returns
        -------
        tuple
            DistTensors; plain tensors and None as they are.
        """
        pairs = zip(blocks, layouts, strict=True)
        return tuple(b if b is None or layout is None else self.wrap(b, layout) for b, layout in pairs)

    def to_blocks(self, answer: Any, layouts: Sequence[BlockLayout]) -> Any:
        """Return the blocks of the gradients that a hook returned.

        Parameters
        ----------
        answer : Any
            What the hook returned: a gradient, a tuple of them, or None.
        layouts : sequence of BlockLayout
            One for each gradient.

        Returns
        -------
        tuple or None
            None if the hook returned None.
        """
        if answer is None:
            return None
        answer = answer if isinstance(answer, tuple) else (answer,)
        pairs = zip(answer, layouts, strict=True)
        return tuple(a if a is None or layout is None else self.block(a, layout) for a, layout in pairs)


class _UnknownGradients(Sequence[Any]):
    """Gradients of a node's operands, which raise if they are read: a single process has no such node."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        raise UnsupportedOperation(
            "grad_input in a hook on a distributed tensor's grad_fn (register_hook, Module.register_backward_hook): "
            "the distributed graph has other nodes than that of one process; use register_full_backward_hook, or "
            "x.register_hook on the operand"
        )


def mark_leaf(local: torch.Tensor, layout: BlockLayout) -> None:
    """Mark a tensor as the block of a distributed leaf, so that :attr:`GradFn.next_functions` finds its layout.

    Parameters
    ----------
    local : Tensor
        The block.
    layout : BlockLayout
        Its layout.
    """
    setattr(local, _LEAF, layout)


class GradFn:
    """The node that computed a DistTensor's block. Attributes other than hooks and neighbours are the node's own.

    Parameters
    ----------
    node : Node
        The node.
    layout : BlockLayout
        The layout of its result; None if it is not known.
    layouts : BlockConverter
        Converts gradients.
    """

    def __init__(self, node: Node, layout: BlockLayout, layouts: BlockConverter) -> None:
        self._node, self._layout, self._layouts = node, layout, layouts

    def __getattr__(self, name: str) -> Any:
        # Only for attributes that this class does not have.
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        # Two GradFn of one node are the same node to code that walks the graph.
        return self._node is (other._node if isinstance(other, GradFn) else other)

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return repr(self._node)

    def __call__(self, *_: Any) -> None:
        """Raise: a call with a gradient would run steps that a single process does not have.

        Raises
        ------
        UnsupportedOperation
            Always.
        """
        raise UnsupportedOperation(
            "grad_fn of a DistTensor, called with a gradient: the distributed graph has other nodes than that of one "
            "process; use torch.autograd.grad(y, x, gradient)"
        )

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """The nodes of the operands, each with the index of the result that is the operand.

        The layout of a result is known for leaves only. Registering a hook on another node raises UnsupportedOperation.
        """
        return tuple((self._neighbour(node), number) for node, number in self._node.next_functions)

    def _neighbour(self, node: Node | None) -> Any:
        leaf = getattr(node, "variable", None)
        layout = getattr(leaf, _LEAF, None)
        # The node of a plain leaf is that of a single process, so it is returned as it is.
        return node if node is None or (leaf is not None and layout is None) else GradFn(node, layout, self._layouts)

    def register_prehook(self, hook: Callable[[tuple[Any, ...]], Any]) -> Any:
        """Call a hook with the gradient of the node's result, before the node runs.

        Parameters
        ----------
        hook : callable
            Gets a tuple of one gradient, and may return another one.

        Returns
        -------
        RemovableHandle
            Removes the hook.

        Raises
        ------
        UnsupportedOperation
            If the node has no single distributed result.
        """
        only = self._only("register_prehook")
        layouts = self._layouts
        return self._node.register_prehook(
            lambda blocks: layouts.to_blocks(hook(layouts.to_global(blocks, only)), only)
        )

    def register_hook(self, hook: Callable[[Any, tuple[Any, ...]], Any]) -> Any:
        """Call a hook with the gradient of the node's result, after the node has run.

        Parameters
        ----------
        hook : callable
            Gets the gradients of the operands, which raise if they are read, and a tuple of the result's gradient. It
            must return None.

        Returns
        -------
        RemovableHandle
            Removes the hook.

        Raises
        ------
        UnsupportedOperation
            If the node has no single distributed result.
        """
        only = self._only("register_hook")

        def call(grad_inputs: Sequence[Any], grad_outputs: Sequence[Any]) -> None:
            unknown = _UnknownGradients(len(grad_inputs)) if grad_inputs else ()
            if hook(unknown, self._layouts.to_global(grad_outputs, only)) is not None:
                raise UnsupportedOperation(
                    "a hook on a distributed tensor's grad_fn (register_hook, Module.register_backward_hook) that "
                    "returns other gradients: use register_full_backward_hook, or x.register_hook on the operand"
                )

        return self._node.register_hook(call)

    def _only(self, method: str) -> tuple[BlockLayout]:
        if self._layout is None or len(self._node._input_metadata) != 1:
            raise UnsupportedOperation(
                f"{method} on {self._node.name()}, a node of the distributed graph whose result is not one tensor of a "
                "single process: use register_hook on the tensor"
            )
        return (self._layout,)
