"""DistTensor: a torch.Tensor whose elements are split over the ranks of a process grid."""

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
from distconv.autograd.graph_nodes import GradFn, Layouts, mark_leaf
from distconv.communication import agreement, collectives, gradient_reduction
from distconv.communication.digest import checksum
from distconv.distribution import Distribution
from distconv.errors import DistconvError, UnsupportedOperation
from distconv.grid import ProcessGrid
from distconv.process import call_stack, profiling

_BELOW = (
    "below torch's function interface, where it has only its block: torch.func (grad, vmap, jvp, jacrev), TorchScript, "
    "torch.as_tensor(x, dtype=...) and as_subclass work there; use torch.autograd.grad or torch.autograd.functional, "
    "call the Python function, x.to(dtype), or gather it first"
)

Strides = tuple[int, ...] | None
_DATA = vars(torch._C.TensorBase)["data"]


class DistTensor(torch.Tensor):
    """A global tensor of which this rank holds ``local``, the block it owns under ``dist``.

    Functions of torch called with it go to distributed operators; ``shape``, ``dtype`` and ``device`` are those of the
    global tensor. It has no storage of its own: autograd lives on ``local``.
    """

    gives_way_to: ClassVar[set[type]] = set()
    """Kinds of tensors that handle calls with DistTensors themselves."""

    dist: Distribution
    _local: torch.Tensor
    _shape: torch.Size
    _strides: Strides = None
    """Those that it has in one process, if they are not those of a contiguous tensor: see distconv.memory_order."""
    _memory: Any = None
    """What the tensors that share its memory have in common, and ..."""
    _view: Any = None
    """... where it comes from, if it is a view of another: see distconv.layers.plumbing.inplace_views."""

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, dist: Distribution, shape: Sequence[int], strides: Strides = None
    ) -> DistTensor:
        """Wrap ``local`` without a check; users call :func:`from_local`, which checks."""
        self: DistTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=local.dtype, device=local.device
        )
        self._local = local
        self._lay_out(dist, shape, strides)
        if recomputation.active:
            recomputation.made(local, dist.grid.world)
        return self

    def __init__(self, *_: Any) -> None:
        """Nothing is left to do; torch's own would take no arguments."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in dispatch.METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        try:
            if len(types) > 1 and not cls.gives_way_to.isdisjoint(types):
                return NotImplemented
            if torch._C._are_functorch_transforms_active():
                raise UnsupportedOperation(f"{dispatch.name_of(func)} reached a DistTensor {_BELOW}")
            if recomputation.active:
                recomputation.step()
            if agreement.level == "all":
                _agree_on_call(dispatch.name_of(func), args, kwargs)
            kwargs = kwargs or {}
            with profiling.section(dispatch.short_name(func)) if profiling.enabled() else nullcontext():
                own = dispatch.on_one_rank(func, args, kwargs)
                result = dispatch.called(func, args, kwargs) if own is NotImplemented else own
            if recomputation.active:
                recomputation.step(result)
            return memory_order.follow(func, args, kwargs, result) if own is NotImplemented else own
        except DistconvError as error:
            dispatch.name_layer(error)
            raise

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if not dispatch.has_operator(func):
            raise UnsupportedOperation(f"{func} reached a DistTensor {_BELOW}")
        return dispatch.called(func, args, kwargs or {})

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def local(self) -> torch.Tensor:
        """The block that this rank holds. Collective for a moved view whose source has been changed in place."""
        if self._view is not None:
            self._view.refresh(self)
        return self._local

    @local.setter
    def local(self, value: torch.Tensor) -> None:
        self._local = value

    def _lay_out(self, dist: Distribution, shape: Sequence[int], strides: Strides) -> None:
        """Let it be laid out so from now on: ``local`` is that block of it already."""
        self.dist, self._shape, self._strides = dist, torch.Size(shape), strides

    @property
    def grid(self) -> ProcessGrid:
        """The process grid it is split over."""
        return self.dist.grid

    # Plain attributes: asking torch for them would come back through __torch_function__ each time.

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
        """How many dimensions it has."""
        return len(self._shape)

    ndimension = dim
    ndim = property(dim)

    def size(self, dim: int | None = None) -> Any:
        """The global shape, or the global extent of ``dim``."""
        return self._shape if dim is None else self._shape[dim]

    def numel(self) -> int:
        """How many elements all ranks hold together, each counted once."""
        return self._shape.numel()

    def box(self) -> tuple[Any, ...]:
        """Half-open global range of each dimension that ``local`` covers."""
        return self.dist.box(None, self.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # Nothing is sent for it: one rank alone may print. The value is known where there is but one, on every rank.
        single = self.numel() == 1 and not self.dist.split_axes and self._view is None
        value = f"{self._local.item()}, " if single else ""
        box = () if self.dist.cyclic else self.box()
        mine = ", ".join(f"{i.start}:{i.stop}" for i in box) or f"{tuple(self._local.shape)}"
        described = f"shape={tuple(self.shape)}, dtype={self.dtype}, {self.dist}"
        return f"DistTensor({value}{described})" if single else f"DistTensor({described}, of which here [{mine}])"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __deepcopy__(self, memo: object) -> DistTensor:
        if not self.is_leaf:
            raise RuntimeError("deepcopy of a DistTensor that is no leaf of autograd's graph: detach() it first")
        twin = self._twin(DistTensor(self.local.detach().clone(), self.dist, self.shape))
        if self.grad is not None and not isinstance(self, torch.nn.Parameter):
            twin.grad = copy.deepcopy(self.grad)
        return twin

    def __copy__(self) -> DistTensor:
        # As torch's: another tensor on the same memory, and a leaf.
        return self._twin(self.detach())  # type: ignore[arg-type]

    def _twin(self, twin: DistTensor) -> DistTensor:
        """``twin``, a leaf, as all that this is besides a tensor: a parameter whose gradient is summed somehow."""
        local = twin.local.requires_grad_(self.requires_grad)
        vars(local).update({key: value for key, value in vars(self.local).items() if key not in vars(local)})
        # Where a view comes from stays with the view.
        own = (*vars(twin), "_memory", "_view")
        vars(twin).update({key: value for key, value in vars(self).items() if key not in own})
        return twin

    def __reduce_ex__(self, protocol: object) -> Any:
        raise UnsupportedOperation(
            "a DistTensor cannot be pickled: its ranks each hold a block; save gather() of it, or a model's "
            "state_dict(), whose tensors are whole"
        )

    # -- moving -------------------------------------------------------------------------------------------------------

    def redistribute(self, target: Distribution | ProcessGrid) -> DistTensor:
        """The same tensor under another distribution, or with the same axes over another grid of these ranks."""
        dist = Distribution(target, self.dist.axes) if isinstance(target, ProcessGrid) else target
        if dist == self.dist:
            return self
        if agreement.level == "all":
            _agree_on_call(f"redistribution to {dist}", (self,))
        local = collectives.redistribute(self.local, self.dist, dist, self.shape)
        return DistTensor(local, dist, self.shape, self._strides)

    def replicated(self, dims: Sequence[int] | None = None) -> DistTensor:
        """The same tensor with ``dims`` (default: all) whole on every rank."""
        return self.redistribute(self.dist.replicate(dims))

    def gather(self, *args: Any, **kwargs: Any) -> Any:
        """Without arguments the whole tensor as a plain one on every rank; with them ``torch.gather``."""
        if args or kwargs:
            return torch.gather(self, *args, **kwargs)
        whole = self.replicated().local
        return whole.clone() if whole is self.local else whole

    # -- autograd -----------------------------------------------------------------------------------------------------

    @property
    def data(self) -> DistTensor:
        """The tensor outside autograd, on the same memory.

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
        new = laid_out(value, self.dist)
        if value.dtype is not self.dtype:
            # What torch reads off the wrapper itself.
            with torch._C.DisableTorchFunctionSubclass():
                _DATA.__set__(self, new)
        self.local.data = new.local

    def set_(self, source: Any = None, *place: Any) -> DistTensor:
        """Itself, from now on on the memory of ``source``, a tensor of this shape.

        Raises
        ------
        UnsupportedOperation
            Without one, or for a place in its storage.
        """
        if place or source is None:
            raise UnsupportedOperation(
                "set_ of a DistTensor takes a tensor of its shape: its memory lies on many ranks"
            )
        self.data = source
        return self

    @property
    def requires_grad(self) -> bool:
        """Whether autograd records what is done with it."""
        return self.local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.local.requires_grad = value
        mark_leaf(self.local, (self.dist, self.shape))

    def requires_grad_(self, requires_grad: bool = True) -> DistTensor:
        """Itself, from now on with gradients or without."""
        self.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> DistTensor | None:
        """The gradient, distributed as the tensor is, or None. Collective after a backward pass under ``no_sync``.

        Raises
        ------
        RuntimeError
            If it is set to a tensor of another shape.
        """
        gradient_reduction.settle(self.local)
        grad = self.local.grad
        return None if grad is None else DistTensor(grad, self.dist, self.shape)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None and value.shape != self.shape:
            raise RuntimeError(f"assigned grad has shape {tuple(value.shape)}, but the tensor {tuple(self.shape)}")
        gradient_reduction.forget(self.local)
        self.local.grad = None if value is None else laid_out(value, self.dist).local

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """The autograd node that made ``local``; hooks on it see whole gradients."""
        node = self.local.grad_fn
        return node if node is None or hasattr(node, "layouts") else GradFn(node, (self.dist, self.shape), LAYOUTS)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether no recorded operation made it."""
        return self.local.is_leaf

    def retain_grad(self) -> None:
        """Keep the gradient although this is no leaf."""
        self.local.retain_grad()

    def register_hook(self, hook: Callable[[DistTensor], DistTensor | None]) -> Any:
        """Call ``hook`` with the gradient, a DistTensor; what it returns, if anything, replaces the gradient."""
        layout = (self.dist, self.shape)

        def call(grad: torch.Tensor) -> torch.Tensor | None:
            changed = hook(DistTensor(grad, *layout))
            return None if changed is None else LAYOUTS.block(changed, layout)

        return self.local.register_hook(call)

    def register_post_accumulate_grad_hook(self, hook: Callable[[DistTensor], None]) -> Any:
        """Call ``hook`` with this leaf once its gradient has been added."""
        return self.local.register_post_accumulate_grad_hook(lambda _: hook(self))

    def backward(
        self, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        """Gradients of this tensor; ``gradient`` (whole or distributed) as torch asks for it. Collective."""
        if gradient is None and self.numel() == 1 and self.dist.split_axes:
            return self.replicated().backward(None, retain_graph, create_graph, inputs)
        if gradient is not None:
            gradient = laid_out(gradient, self.dist).local
        if isinstance(inputs, torch.Tensor):
            inputs = [inputs]
        if inputs is not None:
            inputs = [i.local if isinstance(i, DistTensor) else i for i in inputs]
        self.local.backward(gradient, retain_graph, create_graph, inputs)

    # -- single values ------------------------------------------------------------------------------------------------

    def item(self) -> Any:
        """The value of a tensor of one element, on every rank."""
        return self.replicated().local.item()

    def tolist(self) -> Any:
        """All values as nested lists, on every rank. Collective."""
        return self.replicated().local.tolist()

    def _number(self) -> Any:
        if self.numel() != 1:
            raise ValueError("only one element tensors can be converted to Python scalars")
        return self.item()

    def __float__(self) -> float:
        return float(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def __complex__(self) -> complex:
        return complex(self._number())

    def __bool__(self) -> bool:
        if self.numel() > 1:
            raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
        return bool(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 or (self.numel() == 1 and spec) else repr(self)


def laid_out(tensor: torch.Tensor, dist: Distribution) -> DistTensor:
    """``tensor`` under ``dist``: a DistTensor moved, of a plain one, equal on all ranks, the block."""
    distributed = tensor if isinstance(tensor, DistTensor) else DistTensor(tensor, dist.replicate(), tensor.shape)
    return distributed.redistribute(dist)


LAYOUTS = Layouts(
    lambda block, layout: DistTensor(block, *layout), lambda whole, layout: laid_out(whole, layout[0]).local
)
"""For hooks on autograd's nodes: gradients as DistTensors, and their blocks."""


def _agree_on_call(what: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
    """Check that all ranks call ``what`` in the same layer, with equal numbers and plain tensors. Collective."""
    leaves = tree_leaves((args, kwargs or {}))
    first = next((leaf for leaf in leaves if isinstance(leaf, DistTensor)), None)
    if first is not None:
        listed = ", ".join(filter(None, map(_described, leaves)))
        agreement.check_same_on_all_ranks(first.grid.compared, what + call_stack.running_layer(), listed)


def _described(argument: Any) -> str:
    """Return what must be the same on all ranks of an argument of a call."""
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
    return repr(argument) if type(argument) in (bool, int, float, complex, str, slice) else ""
