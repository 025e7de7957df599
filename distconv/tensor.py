"""DistTensor: a torch.Tensor whose elements are distributed over the ranks of a process grid.

The class routes torch functions to the operator registry (``distconv.dispatch``) and attributes and methods to the
local block. It contains no operator: ``distconv.layers`` registers them. Autograd records operations on ``local``.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from distconv import dispatch, memory_order
from distconv.autograd import recomputation
from distconv.autograd.graph_nodes import BlockConverter, GradFn, mark_leaf
from distconv.communication import agreement, collectives, gradient_reduction
from distconv.communication.digest import checksum
from distconv.distribution import Distribution
from distconv.errors import DistconvError, UnsupportedOperation
from distconv.grid import ProcessGrid
from distconv.process import call_stack, profiling

_REACHED_BELOW_DISPATCH = (
    "below torch's function interface, where it has only its block. torch.func (grad, vmap, jvp, jacrev), TorchScript, "
    "torch.as_tensor(x, dtype=...) and as_subclass work there. Use torch.autograd.grad or torch.autograd.functional, "
    "call the Python function, use x.to(dtype), or gather the tensor first"
)

Strides = tuple[int, ...] | None
_DATA = vars(torch._C.TensorBase)["data"]


class DistTensor(torch.Tensor):
    """A global tensor, of which this rank holds one block.

    torch functions that are called with a DistTensor run distributed operators. They are collective unless they only
    read metadata. ``shape``, ``dtype`` and ``device`` are those of the global tensor. A DistTensor has no storage of
    its own: ``data_ptr()`` and everything below torch's function interface see no data. Make one with :func:`scatter`
    or :func:`from_local`.

    Parameters
    ----------
    local : Tensor
        The block that this rank owns under ``dist``. It is not checked and not copied.
    dist : Distribution
        Which rank owns which indices.
    shape : sequence of int
        Global shape.
    strides : tuple of int, optional
        Strides of the full tensor in a single process, if it is not contiguous there (``distconv.memory_order``).

    Attributes
    ----------
    local : Tensor
        This rank's block. Autograd's graph is made of such blocks.
    dist : Distribution
        The distribution.
    grid : ProcessGrid
        The grid.

    Examples
    --------
    >>> import torch, distconv as dc
    >>> x = dc.scatter(torch.ones(2, 3), dc.ProcessGrid(n=1))
    >>> type(x).__name__, isinstance(x, torch.Tensor), x.sum().item()
    ('DistTensor', True, 6.0)
    """

    defers_to: ClassVar[set[type]] = set()
    """Tensor classes that handle calls with DistTensors themselves: ``__torch_function__`` returns NotImplemented."""

    dist: Distribution
    _local: torch.Tensor
    _shape: torch.Size
    _strides: Strides = None
    """Strides in a single process; None for those of a contiguous tensor. See ``distconv.memory_order``."""
    _memory: Any = None
    """State that all tensors on the same memory share. See ``distconv.layers.common.inplace_views``."""
    _view: Any = None
    """The source of a view; None if the tensor is not a view. See ``distconv.layers.common.inplace_views``."""

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, dist: Distribution, shape: Sequence[int], strides: Strides = None
    ) -> DistTensor:
        """Wrap ``local`` without a check. Users call :func:`from_local`, which checks."""
        self: DistTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=local.dtype, device=local.device
        )
        self._local = local
        self._set_layout(dist, shape, strides)
        if recomputation.active:
            recomputation.register_result(local, dist.grid.world)
        return self

    def __init__(self, *_: Any) -> None:
        """Do nothing; torch's ``__init__`` takes no arguments."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # First, because torch reads these often. They are the same on all ranks and need no message.
        if func in dispatch.METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        try:
            if len(types) > 1 and not cls.defers_to.isdisjoint(types):
                return NotImplemented
            if torch._C._are_functorch_transforms_active():
                raise UnsupportedOperation(f"{dispatch.name_of(func)} reached a DistTensor {_REACHED_BELOW_DISPATCH}")
            # A recomputation stops at a step, so all ranks must count the same steps: before and after every operator.
            if recomputation.active:
                recomputation.count_step()
            if agreement.level == "all":
                _check_same_call(dispatch.name_of(func), args, kwargs)
            kwargs = kwargs or {}
            with profiling.section(dispatch.short_name(func)) if profiling.enabled() else nullcontext():
                own = dispatch.call_on_single_rank(func, args, kwargs)
                result = dispatch.dispatch_call(func, args, kwargs) if own is NotImplemented else own
            if recomputation.active:
                recomputation.count_step(result)
            # torch itself has made the strides of a result on one rank.
            return memory_order.propagate_strides(func, args, kwargs, result) if own is NotImplemented else own
        except DistconvError as error:
            dispatch.add_layer_name(error)
            raise

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if not dispatch.has_operator(func):
            raise UnsupportedOperation(f"{func} reached a DistTensor {_REACHED_BELOW_DISPATCH}")
        return dispatch.dispatch_call(func, args, kwargs or {})

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def local(self) -> torch.Tensor:
        """The block that this rank holds.

        Collective for a view that was moved between ranks, if its source was modified in place since: the view is then
        taken again.
        """
        if self._view is not None:
            self._view.refresh(self)
        return self._local

    @local.setter
    def local(self, value: torch.Tensor) -> None:
        self._local = value

    def _set_layout(self, dist: Distribution, shape: Sequence[int], strides: Strides) -> None:
        """Set distribution, global shape and strides; ``local`` must already be the block under ``dist``."""
        self.dist, self._shape, self._strides = dist, torch.Size(shape), strides

    @property
    def grid(self) -> ProcessGrid:
        """The process grid."""
        return self.dist.grid

    # Python properties: torch's own attributes would go through __torch_function__ each time.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of ``local``."""
        return self._local.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of ``local``."""
        return self._local.device

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self._shape)

    ndimension = dim
    ndim = property(dim)

    def size(self, dim: int | None = None) -> Any:
        """Return the global shape, or the global size of dimension ``dim``.

        Parameters
        ----------
        dim : int, optional
            Dimension, counted from the end if negative; all dimensions if None.

        Returns
        -------
        object
        """
        return self._shape if dim is None else self._shape[dim]

    def numel(self) -> int:
        """Return the number of elements of the global tensor."""
        return self._shape.numel()

    def box(self) -> tuple[Any, ...]:
        """Return the global indices of ``local``: one :class:`Interval` for each dimension.

        Raises
        ------
        DistributionError
            If a dimension is block-cyclic.
        """
        return self.dist.box(None, self.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # Sends no message, because one rank alone may print. A single value is shown if every rank has it.
        single = self.numel() == 1 and not self.dist.split_axes and self._view is None
        value = f"{self._local.item()}, " if single else ""
        box = () if self.dist.cyclic else self.box()
        mine = ", ".join(f"{i.start}:{i.stop}" for i in box) or f"{tuple(self._local.shape)}"
        description = f"shape={tuple(self.shape)}, dtype={self.dtype}, {self.dist}"
        return f"DistTensor({value}{description})" if single else f"DistTensor({description}, of which here [{mine}])"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __deepcopy__(self, memo: object) -> DistTensor:
        if not self.is_leaf:
            raise RuntimeError("deepcopy of a DistTensor that is not a leaf of autograd's graph: detach() it first")
        result = self._copy_attributes_to(DistTensor(self.local.detach().clone(), self.dist, self.shape))
        # As in torch, a copy of a Parameter has no gradient.
        if self.grad is not None and not isinstance(self, torch.nn.Parameter):
            result.grad = copy.deepcopy(self.grad)
        return result

    def __copy__(self) -> DistTensor:
        # As copy.copy of a torch tensor: another leaf on the same memory.
        return self._copy_attributes_to(self.detach())  # type: ignore[arg-type]

    def _copy_attributes_to(self, leaf: DistTensor) -> DistTensor:
        """Return ``leaf``, a new leaf, with the attributes of this tensor, such as how its gradient is reduced."""
        local = leaf.local.requires_grad_(self.requires_grad)
        # Marks of the block, such as the name under which its gradient is reduced. A copy of a parameter has them, too.
        vars(local).update({key: value for key, value in vars(self.local).items() if key not in vars(local)})
        # These attributes belong to the tensor's own memory.
        own = (*vars(leaf), "_memory", "_view")
        vars(leaf).update({key: value for key, value in vars(self).items() if key not in own})
        return leaf

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A tensor without dimensions, such as a loss that a callback saves on rank 0, is complete on every rank of any
        # grid. That of a view may communicate.
        if not self._shape and self._view is None:
            return self._local.detach().__reduce_ex__(protocol)
        raise UnsupportedOperation(
            "a DistTensor cannot be pickled, because each rank holds only a block. Save the result of gather(), or a "
            "model's state_dict(), whose tensors are full"
        )

    # -- redistribution -----------------------------------------------------------------------------------------------

    def redistribute(
        self, target: Distribution | ProcessGrid | None = None, *, placements: Sequence[Any] | None = None
    ) -> DistTensor:
        """Return the same global tensor under another distribution.

        Collective: call on every rank. Differentiable: the backward pass redistributes the gradient back.

        Parameters
        ----------
        target : Distribution or ProcessGrid
            The distribution, or another grid of the same ranks, over which the same axes split the tensor.
        placements : sequence of torch.distributed.tensor.Replicate, optional
            Instead of ``target``, as models pass it that also take a DTensor: the result is complete on every rank.

        Returns
        -------
        DistTensor
            This tensor, if it already has the distribution.

        Raises
        ------
        UnsupportedOperation
            If neither or both are given, or a placement is not ``Replicate``.
        """
        if placements is not None and target is None and all(p.is_replicate() for p in placements):
            target = self.dist.replicate()
        elif target is None or placements is not None:
            raise UnsupportedOperation(
                f"redistribute: no distribution (placements={placements}). Pass a Distribution or a "
                "ProcessGrid; of a DTensor's placements only Replicate() can be used"
            )
        dist = Distribution(target, self.dist.axes) if isinstance(target, ProcessGrid) else target
        if dist == self.dist:
            return self
        if agreement.level == "all":
            _check_same_call(f"redistribution to {dist}", (self,))
        local = collectives.redistribute(self.local, self.dist, dist, self.shape)
        return DistTensor(local, dist, self.shape, self._strides)

    def replicated(self, dims: Sequence[int] | None = None) -> DistTensor:
        """Return the same global tensor with some dimensions complete on every rank.

        Collective: call on every rank. Differentiable.

        Parameters
        ----------
        dims : sequence of int, optional
            The dimensions (default: all).

        Returns
        -------
        DistTensor
        """
        return self.redistribute(self.dist.replicate(dims))

    def gather(self, *args: Any, **kwargs: Any) -> Any:
        """Return the full tensor as a plain tensor on every rank; with arguments, call ``torch.gather``.

        Collective: call on every rank. Differentiable.

        Parameters
        ----------
        *args : object
            None to gather the tensor, or arguments of ``torch.gather``.
        **kwargs : object
            Likewise.

        Returns
        -------
        Tensor or DistTensor
            The full tensor, which does not share memory with ``local``, or the result of ``torch.gather``.
        """
        if args or kwargs:
            return torch.gather(self, *args, **kwargs)
        full = self.replicated().local
        return full.clone() if full is self.local else full  # a copy: the caller may modify it

    # -- autograd -----------------------------------------------------------------------------------------------------

    @property
    def data(self) -> DistTensor:
        """The tensor without autograd, on the same memory.

        Raises
        ------
        UnsupportedOperation
            If it is set to a tensor of another shape or on another device.
        """
        return dispatch.operator_for(_DATA.__get__)(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if (value.shape, value.device) != (self.shape, self.device):
            raise UnsupportedOperation(
                f"a DistTensor of {tuple(self.shape)} on {self.device} cannot become {tuple(value.shape)} on "
                f"{value.device} in place: move the model before parallelize, or the tensor with .to() or reshape()"
            )
        new = to_distribution(value, self.dist)
        if value.dtype is not self.dtype:
            # torch reads the dtype of the wrapper itself, not of the block.
            with torch._C.DisableTorchFunctionSubclass():
                _DATA.__set__(self, new)
        # The block remains the same object: optimizers and autograd's graph refer to it.
        self.local.data = new.local

    def set_(self, source: Any = None, *memory_layout: Any) -> DistTensor:
        """Make this tensor use the memory of ``source``, a tensor of the same shape, and return this tensor.

        Parameters
        ----------
        source : object
            DistTensor of the same shape, whose distribution this tensor keeps.
        *memory_layout : object
            Offset, size and strides as in torch; they are not supported.

        Returns
        -------
        DistTensor

        Raises
        ------
        UnsupportedOperation
            If ``source`` is missing, or an offset into its storage is given.
        """
        if memory_layout or source is None:
            raise UnsupportedOperation(
                "set_ of a DistTensor requires a tensor of its shape, because its memory is distributed over ranks"
            )
        self.data = source
        return self

    @property
    def requires_grad(self) -> bool:
        """True if autograd records operations on this tensor. Otherwise it is a constant."""
        return self.local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.local.requires_grad = value
        mark_leaf(self.local, (self.dist, self.shape))

    def requires_grad_(self, requires_grad: bool = True) -> DistTensor:
        """Set ``requires_grad`` and return this tensor.

        Parameters
        ----------
        requires_grad : bool
            True to record operations on this tensor for the backward pass.

        Returns
        -------
        DistTensor
        """
        self.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> DistTensor | None:
        """The gradient, distributed as this tensor, or None. Collective after a backward pass under ``no_sync``.

        Raises
        ------
        RuntimeError
            If it is set to a tensor of another shape.
        """
        gradient_reduction.synchronize_grads(self.local)
        grad = self.local.grad
        return None if grad is None else DistTensor(grad, self.dist, self.shape)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None and value.shape != self.shape:
            raise RuntimeError(f"assigned grad has shape {tuple(value.shape)}, but the tensor {tuple(self.shape)}")
        # Otherwise sums of a backward pass that are still in flight would be added to the new gradient.
        gradient_reduction.discard_pending(self.local)
        self.local.grad = None if value is None else to_distribution(value, self.dist).local

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """The autograd node that made ``local``; hooks on the node receive gradients of global tensors."""
        node = self.local.grad_fn
        return node if node is None or hasattr(node, "layouts") else GradFn(node, (self.dist, self.shape), LAYOUTS)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """True if no recorded operation made this tensor. Otherwise it has a ``grad_fn``."""
        return self.local.is_leaf

    def retain_grad(self) -> None:
        """Keep the gradient of this tensor although it is not a leaf."""
        self.local.retain_grad()

    def register_hook(self, hook: Callable[[DistTensor], DistTensor | None]) -> Any:
        """Call a hook with the gradient of this tensor.

        Parameters
        ----------
        hook : callable
            Called with the gradient, a DistTensor. If it returns a tensor, that replaces the gradient.

        Returns
        -------
        torch.utils.hooks.RemovableHandle
        """
        # Not self: the tensor would be kept alive by its own hook.
        layout = (self.dist, self.shape)

        def call(grad: torch.Tensor) -> torch.Tensor | None:
            changed = hook(DistTensor(grad, *layout))
            return None if changed is None else LAYOUTS.block(changed, layout)

        return self.local.register_hook(call)

    def register_post_accumulate_grad_hook(self, hook: Callable[[DistTensor], None]) -> Any:
        """Call ``hook`` with this leaf after its gradient has been accumulated; return torch's handle.

        Parameters
        ----------
        hook : callable
            Function of the leaf.

        Returns
        -------
        object
        """
        return self.local.register_post_accumulate_grad_hook(lambda _: hook(self))

    def backward(
        self, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        """Compute the gradients of this tensor with respect to the leaves of the graph.

        Collective: call on every rank.

        Parameters
        ----------
        gradient : Tensor or DistTensor, optional
            The gradient of this tensor: distributed, or a full one that is identical on all ranks.
        retain_graph, create_graph, inputs
            As in torch.
        """
        # On a rank with an empty block torch would reject a backward pass without a gradient.
        if gradient is None and self.numel() == 1 and self.dist.split_axes:
            return self.replicated().backward(None, retain_graph, create_graph, inputs)
        if gradient is not None:
            gradient = to_distribution(gradient, self.dist).local
        if isinstance(inputs, torch.Tensor):
            inputs = [inputs]
        if inputs is not None:
            inputs = [i.local if isinstance(i, DistTensor) else i for i in inputs]
        self.local.backward(gradient, retain_graph, create_graph, inputs)

    def as_subclass(self, cls: type[Any]) -> Any:
        """Return the full tensor as a plain tensor of another class, with a ReplicationWarning if it is gathered.

        Collective: call on every rank. Differentiable. torch calls this method below its function interface.

        Parameters
        ----------
        cls : type
            Subclass of ``torch.Tensor``, such as MONAI's ``MetaTensor``.

        Returns
        -------
        Tensor
        """
        return dispatch.operator_for(torch.Tensor.as_subclass)(self, cls)

    # -- single values ------------------------------------------------------------------------------------------------

    def item(self) -> Any:
        """Return the value of a tensor of one element, on every rank. Collective."""
        return self.replicated().local.item()

    def tolist(self) -> Any:
        """Return all values as nested lists, on every rank. Collective."""
        return self.replicated().local.tolist()

    def _scalar(self) -> Any:
        if self.numel() != 1:
            raise ValueError("only one element tensors can be converted to Python scalars")
        return self.item()

    def __float__(self) -> float:
        return float(self._scalar())

    def __int__(self) -> int:
        return int(self._scalar())

    def __complex__(self) -> complex:
        return complex(self._scalar())

    def __bool__(self) -> bool:
        if self.numel() > 1:
            raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
        return bool(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 or (self.numel() == 1 and spec) else repr(self)


def to_distribution(tensor: torch.Tensor, dist: Distribution) -> DistTensor:
    """Return ``tensor`` under a distribution.

    Collective: call on every rank.

    Parameters
    ----------
    tensor : Tensor or DistTensor
        A DistTensor is redistributed. A plain tensor is a full one that is identical on all ranks; it sends no message.
    dist : Distribution
        Distribution of the result.

    Returns
    -------
    DistTensor
    """
    distributed = tensor if isinstance(tensor, DistTensor) else DistTensor(tensor, dist.replicate(), tensor.shape)
    return distributed.redistribute(dist)


LAYOUTS = BlockConverter(
    lambda block, layout: DistTensor(block, *layout), lambda tensor, layout: to_distribution(tensor, layout[0]).local
)
"""Conversions for hooks on autograd nodes: a block to a DistTensor, and a gradient to its block.

A layout is the pair of a DistTensor's distribution and global shape.
"""


def _check_same_call(what: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
    """Check that all ranks make the same call in the same layer, with equal numbers and plain tensors. Collective."""
    leaves = tree_leaves((args, kwargs or {}))
    first = next((leaf for leaf in leaves if isinstance(leaf, DistTensor)), None)
    if first is not None:
        listed = ", ".join(filter(None, map(_describe_argument, leaves)))
        agreement.check_same_on_all_ranks(first.grid.comparison_comm, what + call_stack.running_layer(), listed)


def _describe_argument(argument: Any) -> str:
    """Describe what must be identical on all ranks about an argument of a call."""
    if isinstance(argument, DistTensor):
        return f"{tuple(argument.shape)} {argument.dtype} {argument.dist}"
    if type(argument) in (torch.Tensor, torch.nn.Parameter) and argument.layout is torch.strided:
        # A plain tensor counts as replicated. Random numbers of NumPy or Python differ between ranks.
        values = f" with checksum {checksum(argument):x}" if not argument.is_meta else ""
        return f"plain {tuple(argument.shape)} {argument.dtype}{values}"
    if isinstance(argument, np.ndarray) and argument.dtype != object:
        return f"array {argument.shape} {argument.dtype} with checksum {zlib.crc32(argument.tobytes()):x}"
    if isinstance(argument, np.generic):
        argument = argument.item()
    # Only of types whose repr() is the same on all ranks. Others contain addresses.
    return repr(argument) if type(argument) in (bool, int, float, complex, str, slice) else ""
