"""When the gradients of parameters are summed: at once, or behind the rest of the backward pass.

A contribution to the gradient of a leaf parameter that :func:`mark` has marked goes to a side buffer; buffers are
summed while backward goes on, large ones where they are and others in buckets, and added to ``.grad`` before
``backward()`` returns. ``.grad`` itself is never reduced. Whoever asks for the ``.grad`` of a parameter earlier, in a
hook, finds what one process would have added by then. Under :func:`no_sync` the buffers are kept until the next pass
outside of it, or until somebody asks. Everything else (plain tensors, ``torch.autograd.grad``, parameters with hooks)
is summed at once.

Source: Dryden et al. 2019, III-A (allreduce of dL/dw) and V-A (hidden behind the layers that follow).
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from mpi4py import MPI
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel

from distconv import recording
from distconv.communication import agreement
from distconv.communication.derived import Derived, creation_order
from distconv.communication.gradient_order import OrderedContributions
from distconv.communication.transport import Reduction
from distconv.communication.weight_digest import TURNS, Comparison, digests_of, length, parts_of
from distconv.errors import UnsupportedOperation
from distconv.process.profiling import section

BUCKET_BYTES = 4 << 20
"""A bucket is sent when it holds this much: small ones cost latency, large ones start late."""

ALONE_BYTES = 1 << 20
"""A share of so much has a sum of its own: to copy it into a bucket takes half as long as to sum it."""

_MARK = "_distconv_deferred"
_COMPARED = "_distconv_compared"
_NUMBER = "_distconv_number"
_numbers = itertools.count()


def mark(parameter: torch.Tensor, name: str) -> None:
    """Mark ``parameter``, called ``name`` in errors, so that its gradient is all-reduced during backward.

    Call on every rank for the same parameters in the same order: gradients of ranks are matched by that order.
    """
    setattr(parameter, _MARK, name)
    setattr(parameter, _NUMBER, next(_numbers))


def name_of(leaf: torch.Tensor | None) -> str:
    """Return the name of a parameter that :func:`mark` has marked, and an empty string for others."""
    return str(getattr(leaf, _MARK, ""))


def ranks_compared(parameter: torch.Tensor) -> int:
    """Return the number of ranks over which the last gradient reduction of ``parameter`` has compared its values."""
    return int(getattr(parameter, _COMPARED, 1))


def check_not_in_ddp(leaf: torch.Tensor) -> None:
    """Check that DistributedDataParallel does not reduce the gradient of ``leaf``, too.

    DDP reads ``.grad`` when autograd has visited the parameter, before distconv has added the sum, and overwrites it.

    Raises
    ------
    UnsupportedOperation
        On every rank, if the forward pass of a parallelized model runs inside of DDP's.
    """
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is not None and hasattr(leaf, _MARK) and any(parameter is leaf for parameter in ddp.parameters()):
        raise ddp_error(f"gradient of {getattr(leaf, _MARK)!r}")


def ddp_error(what: str) -> UnsupportedOperation:
    """Return the error about a parallelized model in DistributedDataParallel."""
    return UnsupportedOperation(
        f"{what}: DistributedDataParallel and parallelize() cannot both reduce the gradients of a model. Remove "
        f"DistributedDataParallel (in Lightning: the DDP strategy): distconv sums gradients itself, and "
        f"dc.ProcessGrid(n={MPI.COMM_WORLD.size}) splits the mini-batch as DDP does"
    )


def defers(leaf: torch.Tensor, accumulator: Node) -> bool:
    """Whether a contribution to ``leaf`` may arrive late; ``accumulator`` is its AccumulateGrad node.

    Not when somebody would see it missing: hooks on the tensor or on that node, or a caller of
    ``torch.autograd.grad``. torch does not tell whether a node has hooks, but who has put some there holds the node,
    which would be gone otherwise.
    """
    if sys.getrefcount(accumulator) > _unheld():
        return False
    if not getattr(leaf, _MARK, "") or leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None):
        return False
    try:
        return torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # torch says so for leaves under torch.autograd.grad
        return False


def _references(node: Node) -> int:
    return sys.getrefcount(node)


@cache
def _probe() -> torch.Tensor:
    """Return a tensor whose graph ends in a leaf that nothing else refers to."""
    with torch.inference_mode(False), torch.enable_grad():
        return torch.zeros((), requires_grad=True).view(())


def _unheld() -> int:
    """What Python counts for a node that is an argument, and that only the graph holds.

    Asked each time: where torch.compile stands between Python and its functions, they are held once more.
    """
    return _references(_probe().grad_fn.next_functions[0][0])  # type: ignore[union-attr, arg-type]


@dataclass(eq=False)
class _Contribution:
    """A contribution to the gradient of ``leaf`` that is to be summed over ``comm``."""

    leaf: torch.Tensor
    share: torch.Tensor
    comm: MPI.Intracomm
    exclusive: bool
    """True if nothing else uses the memory of ``share``, so that it may hold the sum."""

    @property
    def number(self) -> int:
        return int(getattr(self.leaf, _NUMBER))

    @property
    def name(self) -> str:
        return str(getattr(self.leaf, _MARK))


@dataclass(eq=False)
class _Bucket:
    comm: MPI.Intracomm
    dtype: torch.dtype
    leaves: list[torch.Tensor] = field(default_factory=list)
    shares: list[torch.Tensor] = field(default_factory=list)
    nbytes: int = 0
    reduction: Reduction | None = None
    riders: torch.Tensor | None = None
    alone: list[tuple[torch.Tensor, torch.Tensor, Reduction]] = field(default_factory=list)
    """Leaves whose shares have sums of their own; what rides for them is in the bucket."""

    def add(self, leaf: torch.Tensor, share: torch.Tensor, *, exclusive: bool) -> None:
        """``exclusive``: nobody else looks at the memory of ``share``."""
        if share.nbytes < ALONE_BYTES:
            self.leaves.append(leaf)
            self.shares.append(share)
            self.nbytes += share.nbytes
            return
        # A sum of its own on all ranks, whoever else holds its share on one of them.
        if not exclusive:
            with section("pack"):
                share = share.clone(memory_format=torch.contiguous_format)
        reduction = Reduction(self.comm, share, f"gradient sum of {getattr(leaf, _MARK)}")
        self.alone.append((leaf, share, reduction))

    def launch(self, first: bool) -> None:
        """Start the sum; ``first`` of this pass over ``comm``."""
        with section("pack"):
            parts = [share.reshape(-1) for share in self.shares]
            riders = _Riders(self.comm, first)
            leaves = self.all_leaves
            # Nobody looks at what rode in a replay on a GPU, which the host has no part in.
            compared = agreement.level != "off" and (recording.active is None or not leaves[0].is_cuda)
            if compared:
                parts.append(recording.call(riders, *leaves))
            elif agreement.level != "off":
                parts.append(riders.none(leaves[0]))
            if not parts:
                return
            # Half precision is widened by what rides with it, and rounded when it has been summed.
            flat = torch.cat(parts)
            totals = flat.split([part.numel() for part in parts])
            self.shares = [total.view_as(share) for total, share in zip(totals, self.shares, strict=False)]
            self.riders = totals[-1] if compared else None
            if compared:
                for leaf in leaves:
                    setattr(leaf, _COMPARED, self.comm.size)
        self.reduction = Reduction(self.comm, flat, f"gradient sum of {len(self.leaves)} parameters")

    @property
    def all_leaves(self) -> list[torch.Tensor]:
        """Those with sums of their own, and the others."""
        return [*(leaf for leaf, _, _ in self.alone), *self.leaves]

    def finish(self) -> None:
        for leaf, share, reduction in self.alone:
            with section("allreduce"):
                reduction.wait()
            self._give(leaf, share)
        if self.reduction is not None:
            with section("allreduce"):
                self.reduction.wait()
        for leaf, total in zip(self.leaves, self.shares, strict=True):
            self._give(leaf, total)

    def _give(self, leaf: torch.Tensor, total: torch.Tensor) -> None:
        total = total.to(self.dtype)
        grad = _GRAD.__get__(leaf)
        if grad is None:
            # No view of the bucket for autograd, which refuses to detach_() one.
            _GRAD.__set__(leaf, total.detach())
        else:
            grad += total

    def comparison(self) -> Comparison | None:
        """Whether the leaves are the same on all ranks, by what rode with their gradients; None if nothing did."""
        if self.riders is None:
            return None
        leaves = self.all_leaves
        return Comparison(self.comm, leaves, [getattr(leaf, _MARK) for leaf in leaves], self.riders.real)


_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default


@dataclass(frozen=True)
class _Riders:
    """What rides with a bucket of gradients over ``comm``, for the turn that comes."""

    comm: MPI.Intracomm
    first: bool
    """Of a pass: the turn is its number among those over ``comm``, whose ranks may have had others with other ranks."""
    parts: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=dict)
    """By turn those of the weights, which a replay, whose weights stay where they are, does not look for again."""

    def __call__(self, *leaves: torch.Tensor) -> torch.Tensor:
        derived = Derived.of(self.comm)
        derived.backward_passes += self.first
        turn = derived.backward_passes % TURNS
        parts = self.parts.get(turn)
        if parts is None:
            parts = parts_of(leaves, turn)
            if all(map(_is_dense, leaves)):  # otherwise they may be copies
                self.parts[turn] = parts
        return digests_of(*parts, self.comm.size)

    def none(self, leaf: torch.Tensor) -> torch.Tensor:
        """As much as rides, without anything to compare."""
        return leaf.new_zeros(length(self.comm.size), dtype=torch.float32)


class _Backward:
    """The buckets of one backward pass. Only that pass holds it, so a pass that fails leaves nothing behind."""

    def __init__(self, task: int = -1) -> None:
        self.task = task
        self.open: dict[tuple[int, torch.dtype, torch.device], _Bucket] = {}
        self.launched: list[_Bucket] = []
        self._summed: set[int] = set()
        """Communicators over which a bucket has been sent."""
        self._ordered: dict[int, OrderedContributions[_Contribution]] = {}

    def holds(self, leaf: torch.Tensor) -> bool:
        """Whether something is still to be added to ``leaf.grad``."""
        if any(ordered.is_waiting(leaf) for ordered in self._ordered.values()):
            return True
        return any(leaf is each for bucket in (*self.open.values(), *self.launched) for each in bucket.all_leaves)

    def add(self, leaf: torch.Tensor, share: torch.Tensor, comm: MPI.Intracomm, *, exclusive: bool = False) -> None:
        ordered = self._ordered.get(comm.handle)
        if ordered is None:
            ordered = self._ordered[comm.handle] = OrderedContributions(comm)
        for contribution in ordered.add(_Contribution(leaf, share, comm, exclusive)):
            self._fill(contribution)

    def _fill(self, new: _Contribution) -> None:
        key = (new.comm.handle, new.share.dtype, new.share.device)
        bucket = self.open.setdefault(key, _Bucket(new.comm, new.share.dtype))
        bucket.add(new.leaf, new.share, exclusive=new.exclusive)
        if bucket.nbytes >= BUCKET_BYTES:
            self._launch(key)

    def _launch(self, key: tuple[int, torch.dtype, torch.device]) -> None:
        bucket = self.open.pop(key)
        self.launched.append(bucket)
        bucket.launch(bucket.comm.handle not in self._summed)
        self._summed.add(bucket.comm.handle)

    def finish(self) -> None:
        for leaf, share, comm in _take_kept():
            self.add(leaf, share, comm)
        self.add_all()
        _running.pop(self.task, None)
        _watch_gradients()

    def add_all(self) -> None:
        """Add to ``.grad`` what there is so far."""
        # The order of communicators matters: ranks that wait for each other over different ones would deadlock.
        for ordered in sorted(self._ordered.values(), key=lambda ordered: creation_order(ordered.comm)):
            for contribution in ordered.rest():
                self._fill(contribution)
        self._ordered.clear()
        for key in list(self.open):
            self._launch(key)
        comparisons = [_late.pop(0) for _ in range(len(_late))]
        with torch.no_grad():
            while self.launched:
                self.launched[0].finish()
                comparison = self.launched.pop(0).comparison()
                if comparison is not None:
                    (_late if comparison.late else comparisons).append(comparison)
        for comparison in comparisons:
            comparison.check()

    def __del__(self) -> None:
        _running.pop(self.task, None)
        _watch_gradients()
        # MPI may still write to the buffers of sums that a failed backward has started.
        _orphans.extend([*self.launched, *(bucket for bucket in self.open.values() if bucket.alone)])


_running: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()
_orphans: list[_Bucket] = []
_late: list[Comparison] = []


def defer(leaf: torch.Tensor, share: torch.Tensor, comm: MPI.Intracomm, *, exclusive: bool) -> None:
    """Add the sum of ``share`` over ``comm`` to ``leaf.grad`` by the time the running backward returns.

    Under :func:`no_sync`, by the time that anybody looks at it. ``exclusive``: nobody else looks at the memory of
    ``share``, which may hold the sum.
    """
    if _keeping:
        _keep(leaf, share, comm)
        return
    task: int = torch._C._current_graph_task_id()
    backward = _running.get(task)
    if backward is None:
        backward = _running[task] = _Backward(task)
        _watch_gradients()
        torch.autograd.Variable._execution_engine.queue_callback(backward.finish)
    backward.add(leaf, share, comm, exclusive=exclusive)


# -- gradient accumulation --------------------------------------------------------------------------------------------

_keeping = False
"""Whether shares stay on this rank. A plain global: on a GPU autograd runs backward in threads of its own."""


@dataclass(eq=False)
class _Kept:
    """Shares of the gradient of ``leaf`` that are still to be summed, for each communicator."""

    leaf: torch.Tensor
    shares: dict[int, tuple[torch.Tensor, MPI.Intracomm]] = field(default_factory=dict)


_kept: dict[int, _Kept] = {}
"""By the leaf's id, in the order in which they came, which is the same on all ranks.

They hold their leaves, though nobody else may want them any more: when Python frees a model is not the same on all
ranks, and they would not agree on what there is to sum.
"""


@contextmanager
def no_sync() -> Iterator[None]:
    """Backward passes inside sum no gradients of parameters over the ranks: the next one outside does it for all.

    For gradient accumulation over micro-batches, as ``DistributedDataParallel.no_sync``. Whoever looks at a ``.grad``
    earlier (an optimizer, clipping, ``zero_grad``, a print) finds it whole, as in one process: it is summed then, which
    is collective.
    """
    global _keeping
    before, _keeping = _keeping, True
    try:
        yield
    finally:
        _keeping = before


def _keep(leaf: torch.Tensor, share: torch.Tensor, comm: MPI.Intracomm) -> None:
    shares = _kept.setdefault(id(leaf), _Kept(leaf)).shares
    _watch_gradients()
    with torch.no_grad():
        before = shares.get(comm.handle)
        shares[comm.handle] = (share.clone() if before is None else before[0] + share, comm)


def keeps() -> bool:
    """Whether shares stay on this rank: inside :func:`no_sync`."""
    return _keeping


Kept = list[tuple[torch.Tensor, torch.Tensor, MPI.Intracomm]]
"""Leaves and shares of their gradients that are still to be summed over communicators."""


def kept() -> Kept:
    """All shares that are kept, in the order in which they came."""
    return [(each.leaf, share, comm) for each in _kept.values() for share, comm in each.shares.values()]


def keep(shares: Kept) -> None:
    """Let ``shares`` be all that are kept."""
    _kept.clear()
    for leaf, share, comm in shares:
        _kept.setdefault(id(leaf), _Kept(leaf)).shares[comm.handle] = share, comm
    _watch_gradients()


def _take_kept() -> Kept:
    """All shares that are kept, which are kept no longer."""
    taken = kept()
    _kept.clear()
    return taken


def _watch_gradients() -> None:
    """Let whoever asks for a parameter's gradient find it whole, while shares of any are still to be added."""
    if not (_kept or _running):
        if "grad" in vars(torch.nn.Parameter):
            del torch.nn.Parameter.grad
    elif "grad" not in vars(torch.nn.Parameter):
        torch.nn.Parameter.grad = property(_whole_grad, _set_grad, _delete_grad)  # type: ignore[assignment]


def settle(leaf: torch.Tensor) -> None:
    """Make ``leaf.grad`` whole if shares of it are kept or on their way, and with it all others. Collective."""
    _add_running(leaf)
    if id(leaf) in _kept:
        _Backward().finish()


def _add_running(leaf: torch.Tensor) -> None:
    for backward in list(_running.values()):
        if backward.holds(leaf):
            backward.add_all()


def forget(leaf: torch.Tensor) -> None:
    """Give up what is still to be added for ``leaf``: its gradient gets another value."""
    _add_running(leaf)
    kept = _kept.get(id(leaf))
    if kept is not None:
        kept.shares.clear()


_GRAD: Any = torch.Tensor.grad
"""What ``Parameter.grad`` is while nothing is to be added."""


def _whole_grad(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    settle(parameter)
    grad: torch.Tensor | None = _GRAD.__get__(parameter)
    return grad


def _set_grad(parameter: torch.nn.Parameter, grad: torch.Tensor | None) -> None:
    forget(parameter)
    torch.Tensor.grad.__set__(parameter, grad)  # type: ignore[union-attr]


def _delete_grad(parameter: torch.nn.Parameter) -> None:
    _set_grad(parameter, None)
