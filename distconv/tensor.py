"""DistTensor: a torch.Tensor whose elements are split over the ranks of a process grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from distconv import dispatch, memory_order
from distconv.autograd.graph_nodes import GradFn, Layouts, mark_leaf
from distconv.communication import agreement, collectives
from distconv.distribution import Distribution, default_axes
from distconv.errors import DistconvError, DistributionError, UnsupportedOperation
from distconv.grid import ProcessGrid
from distconv.process import profiling, watchdog

_METADATA = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "dim", "ndimension", "size", "numel", "nelement", "is_floating_point", "is_complex", "is_signed",
        "element_size", "is_contiguous", "get_device", "__dir__",
    )
) | frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "layout", "is_cuda", "is_sparse", "is_sparse_csr", "is_quantized", "is_meta", "is_nested", "is_mkldnn",
        "is_xla", "is_mps", "is_cpu", "itemsize", "nbytes", "output_nr",
    )
) | frozenset((
    torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, torch._has_compatible_shallow_copy_type,
))  # fmt: skip
"""What torch reads off the wrapper itself."""


_DATA = vars(torch._C.TensorBase)["data"]


class DistTensor(torch.Tensor):
    """A global tensor of which this rank holds ``local``, the block it owns under ``dist``.

    Functions of torch called with it go to distributed operators; ``shape``, ``dtype`` and ``device`` are those of the
    global tensor. It has no storage of its own: autograd lives on ``local``.
    """

    dist: Distribution  # type: ignore[assignment]
    _local: torch.Tensor
    _shape: torch.Size
    _strides: tuple[int, ...] | None = None
    """Those that it has in one process, if they are not those of a contiguous tensor: see distconv.memory_order."""
    _memory: Any = None
    """What the tensors that share its memory have in common, and ..."""
    _view: Any = None
    """... where it comes from, if it is a view of another: see distconv.layers.plumbing.inplace_views."""

    @staticmethod
    def __new__(cls, local: torch.Tensor, dist: Distribution, shape: Sequence[int]) -> DistTensor:
        """Wrap ``local`` without a check; users call :func:`from_local`, which checks."""
        self: DistTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=local.dtype, device=local.device
        )
        self._local, self.dist, self._shape = local, dist, torch.Size(shape)
        return self

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        try:
            if agreement.level == "all":
                _agree_on_call(func, args)
            if profiling.enabled():
                with profiling.section(dispatch.short_name(func)):
                    result = dispatch.called(func, args, kwargs or {})
            else:
                result = dispatch.called(func, args, kwargs or {})
            return memory_order.follow(func, args, kwargs or {}, result)  # type: ignore[arg-type]
        except DistconvError as error:
            dispatch.name_layer(error)
            raise

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UnsupportedOperation(f"{func} reached a DistTensor below torch's function interface; gather it first")

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

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """How many dimensions it has."""
        return len(self._shape)

    def dim(self) -> int:
        """How many dimensions it has."""
        return len(self._shape)

    ndimension = dim

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
        return (
            f"DistTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {self.dist}, local={tuple(self._local.shape)})"
        )

    def __len__(self) -> int:
        return self.shape[0]

    def __deepcopy__(self, memo: object) -> DistTensor:
        if not self.is_leaf:
            raise RuntimeError("deepcopy of a DistTensor that is no leaf of autograd's graph: detach() it first")
        local = self.local.detach().clone().requires_grad_(self.requires_grad)
        # What it is besides a tensor (a parameter) and how its gradient is summed stay with the copy.
        vars(local).update({key: value for key, value in vars(self.local).items() if key not in vars(local)})
        twin = DistTensor(local, self.dist, self.shape)
        # Where a view comes from stays with the view.
        own = (*vars(twin), "_memory", "_view")
        vars(twin).update({key: value for key, value in vars(self).items() if key not in own})
        return twin

    def __reduce_ex__(self, protocol: object) -> Any:
        raise UnsupportedOperation("a DistTensor cannot be pickled: its ranks each hold a block; save gather() of it")

    # -- moving -------------------------------------------------------------------------------------------------------

    def redistribute(self, target: Distribution | ProcessGrid) -> DistTensor:
        """The same tensor under another distribution, or with the same axes over another grid of these ranks."""
        dist = Distribution(target, self.dist.axes) if isinstance(target, ProcessGrid) else target
        if dist == self.dist:
            return self
        moved = DistTensor(collectives.redistribute(self.local, self.dist, dist, self.shape), dist, self.shape)
        moved._strides = self._strides
        return moved

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
            If it is set to a tensor of another dtype or on another device.
        """
        found: DistTensor = dispatch.operator_for(_DATA.__get__)(self)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.dtype != self.dtype or value.device != self.device:
            raise UnsupportedOperation(
                f"a DistTensor of {self.dtype} on {self.device} cannot become {value.dtype} on {value.device} in "
                "place: convert the model before parallelize, or the tensor with .to()"
            )
        self.local.data = scatter(value, self.dist).local

    def set_(self, source: Any = None, *place: Any) -> DistTensor:
        """Itself, on the memory of ``source`` from now on.

        Raises
        ------
        UnsupportedOperation
            If that is no DistTensor of this shape.
        """
        if place or not isinstance(source, DistTensor) or source.shape != self.shape:
            raise UnsupportedOperation(
                f"set_ of a DistTensor takes another of shape {tuple(self.shape)}: its memory lies on many ranks; "
                "gather it first"
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
        self.local.requires_grad_(requires_grad)
        mark_leaf(self.local, (self.dist, self.shape))
        return self

    @property  # type: ignore[override]
    def grad(self) -> DistTensor | None:
        """The gradient, distributed as the tensor is, or None."""
        grad = self.local.grad
        return None if grad is None else DistTensor(grad, self.dist, self.shape)

    @grad.setter
    def grad(self, value: DistTensor | None) -> None:
        self.local.grad = None if value is None else value.redistribute(self.dist).local

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
            gradient = scatter(gradient, self.dist).local
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

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.numel() == 1 and spec else repr(self)

    def numpy(self, *, force: bool = False) -> Any:
        """Nothing: the elements lie on many ranks.

        Raises
        ------
        UnsupportedOperation
            Always.
        """
        raise UnsupportedOperation(
            "numpy() of a DistTensor: use gather() for the whole or .local for this rank's block"
        )


LAYOUTS = Layouts(
    lambda block, layout: DistTensor(block, *layout), lambda whole, layout: scatter(whole, layout[0]).local
)
"""For hooks on autograd's nodes: gradients as DistTensors, and their blocks."""


def _agree_on_call(func: Any, args: tuple[Any, ...]) -> None:
    tensors = [a for a in args if isinstance(a, DistTensor)]
    if tensors:
        listed = ", ".join(f"{tuple(t.shape)} {t.dtype} {t.dist}" for t in tensors)
        agreement.agree(tensors[0].grid.world, dispatch.name_of(func), listed)


def _distribution(target: ProcessGrid | Distribution, dims: Any, ndim: int) -> Distribution:
    if isinstance(target, Distribution):
        return target
    if not isinstance(target, ProcessGrid):
        raise DistributionError(f"scatter needs a ProcessGrid or a Distribution, not {type(target).__name__}")
    return Distribution(target, default_axes(dims, ndim))


def scatter(
    tensor: torch.Tensor | None,
    target: ProcessGrid | Distribution,
    dims: str | Sequence[str | None] | None = None,
    root: int | None = None,
) -> DistTensor:
    """The global ``tensor`` split over ``target``. Collective and differentiable (the adjoint gathers).

    Every rank passes the same whole tensor, or with ``root`` only that rank does. ``dims`` names each dimension's grid
    axis (``"nhw"`` for label maps); by default N, NC, NCW, NCHW or NCDHW. Grid axes it lacks hold replicas.

    Raises
    ------
    MismatchError
        If shape, dtype, device or requires_grad differ between ranks.
    DistributionError
        If ``dims`` does not fit the tensor.
    """
    grid = target.grid if isinstance(target, Distribution) else target
    if root is not None and isinstance(grid, ProcessGrid):
        return _scatter_from(root, tensor, target, dims)
    if isinstance(tensor, DistTensor):
        return tensor.redistribute(_distribution(target, dims, tensor.dim()))
    if not isinstance(tensor, torch.Tensor):
        raise DistributionError(f"scatter needs a torch.Tensor on every rank, or root=; got {type(tensor).__name__}")
    dist = _distribution(target, dims, tensor.dim())
    agreement.agree(dist.grid.world, "scatter", _described(tensor, dist))
    local = collectives.redistribute(tensor, dist.replicate(), dist, tensor.shape).contiguous()
    # The block is never the caller's memory, whatever the grid: changing one must not change the other.
    made = DistTensor(local.clone() if local.data_ptr() == tensor.data_ptr() else local, dist, tensor.shape)
    made._strides = None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
    return made


def _described(tensor: torch.Tensor, dist: Distribution) -> str:
    grad = ", requires_grad" if tensor.requires_grad else ""
    return f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device.type}{grad}, {dist}"


def _scatter_from(root: int, tensor: torch.Tensor | None, target: ProcessGrid | Distribution, dims: Any) -> DistTensor:
    grid = target.grid if isinstance(target, Distribution) else target
    agreement.agree(grid.world, "scatter", f"root={root}")
    if not 0 <= root < grid.size:
        raise DistributionError(f"scatter: root={root} is not one of the {grid.size} ranks")
    mine = None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.device.type)
    with watchdog.waiting(lambda: f"scatter from rank {root}"):
        described = grid.world.bcast(mine, root=root)
    if described is None:
        raise DistributionError(f"scatter: rank {root} is the root and must pass a tensor")
    shape, dtype, requires_grad, device = described
    dist = _distribution(target, dims, len(shape))
    rows = shape or (1,)
    if grid.rank != root or tensor is None:
        tensor = torch.empty((0, *rows[1:]), dtype=dtype, device=device, requires_grad=requires_grad)
    elif not shape:
        tensor = tensor.reshape(1)
    # All rows on the root: an uneven distribution like any other.
    at_root = (0,) * (root + 1) + (rows[0],) * (grid.size - root)
    source = Distribution(grid.flat, ("n",) + (None,) * (len(rows) - 1), boundaries={"n": at_root})
    local = collectives.redistribute(tensor, source, dist if shape else Distribution(grid, (None,)), rows)
    return DistTensor(local.reshape(dist.local_shape(shape)).contiguous(), dist, shape)


def gather(tensor: DistTensor | torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank. Collective and differentiable (the adjoint slices)."""
    return tensor.gather() if isinstance(tensor, DistTensor) else tensor


def from_local(local: torch.Tensor, dist: Distribution, shape: Sequence[int]) -> DistTensor:
    """A global tensor of ``shape`` of which ``local`` is this rank's block under ``dist``. Collective.

    Raises
    ------
    MismatchError
        If shape, dtype, device or distribution differ between ranks.
    DistributionError
        On every rank, if a rank's block has the wrong shape.
    """
    grad = ", requires_grad" if local.requires_grad else ""
    agreement.agree(
        dist.grid.world, "from_local", f"shape {tuple(shape)}, {local.dtype} on {local.device.type}{grad}, {dist}"
    )

    def check() -> None:
        if tuple(local.shape) != dist.local_shape(shape):
            raise DistributionError(
                f"from_local: the block is {tuple(local.shape)} but {dist} gives {dist.local_shape(shape)} of "
                f"{tuple(shape)}"
            )

    agreement.together(dist.grid.world, check, DistributionError)
    return DistTensor(local.contiguous(), dist, shape)
