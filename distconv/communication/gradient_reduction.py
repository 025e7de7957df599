"""All-reduce of parameter gradients, overlapped with the rest of the backward pass.

A rank's backward pass gives contributions to ``.grad``. They must be summed over the ranks that hold the parameter:

1. :func:`enqueue_contribution` takes a contribution to the gradient of a leaf that :func:`defer_grad_reduction` marked.
2. :mod:`.gradient_order` gives contributions back in an order that all ranks share.
3. Small ones are copied into a bucket, large ones are all-reduced where they are. A full bucket is all-reduced while
   backward continues. The checksum payload of :mod:`.weight_digest` is appended to it.
4. Before ``backward()`` returns, the sums are added to ``.grad``.

``.grad`` itself is never all-reduced, since it may hold gradients of earlier passes. Code that reads the ``.grad`` of a
parameter before step 4, in a hook, gets what a single process would have added by then: the read finishes the sums.
Under :func:`no_sync` contributions remain unsynced until the next pass outside of it, or until ``.grad`` is read.

Contributions that cannot wait are all-reduced at once by :mod:`.collectives`: to plain tensors, under
``torch.autograd.grad``, and to parameters with hooks (:func:`can_defer`).

Source: Dryden et al. 2019, III-A (allreduce of dL/dw) and V-A (overlap with the layers that follow).
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
from distconv.communication.derived import CommunicatorRegistry, creation_order
from distconv.communication.gradient_order import OrderedContributions
from distconv.communication.transport import Reduction
from distconv.communication.weight_digest import ROUNDS, WeightComparison, digest_chunks, payload_length, select_chunks
from distconv.errors import UnsupportedOperation
from distconv.process.profiling import section

BUCKET_BYTES = 4 << 20
"""Size at which a bucket is all-reduced: smaller buckets cost latency, larger ones start late."""

UNBUCKETED_BYTES = 1 << 20
"""Size from which a contribution is all-reduced by itself: copying it into a bucket takes half as long as its sum."""

_NAME = "_distconv_deferred"
"""Attribute of a marked parameter: its name in errors."""
_COMPARED = "_distconv_compared"
"""Attribute of a parameter: the number of ranks over which its last reduction compared its values."""
_NUMBER = "_distconv_number"
"""Attribute of a marked parameter: its position in the order of marking, by which ranks match gradients."""
_numbers = itertools.count()


# -- parameters whose gradients are deferred --------------------------------------------------------------------------


def defer_grad_reduction(parameter: torch.Tensor, name: str) -> None:
    """Mark a parameter, so that its gradient is all-reduced during backward and not at once.

    Call on every rank for the same parameters in the same order: gradients of ranks are matched by that order.

    Parameters
    ----------
    parameter : Tensor
        A leaf: the parameter, or this rank's block of it.
    name : str
        The name that errors show.
    """
    setattr(parameter, _NAME, name)
    setattr(parameter, _NUMBER, next(_numbers))


def parameter_name(leaf: torch.Tensor | None) -> str:
    """Return the name of a parameter that :func:`defer_grad_reduction` marked, or an empty string for others."""
    return str(getattr(leaf, _NAME, ""))


def ranks_compared(parameter: torch.Tensor) -> int:
    """Return the number of ranks over which the last gradient reduction of ``parameter`` compared its values."""
    return int(getattr(parameter, _COMPARED, 1))


def check_not_in_ddp(leaf: torch.Tensor) -> None:
    """Check that DistributedDataParallel does not all-reduce the gradient of ``leaf``, too.

    DDP reads ``.grad`` when autograd has visited the parameter, before distconv has added the sum, and overwrites it.

    Raises
    ------
    UnsupportedOperation
        On every rank, if the forward pass of a parallelized model runs inside of DDP's.
    """
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is not None and hasattr(leaf, _NAME) and any(parameter is leaf for parameter in ddp.parameters()):
        raise ddp_error(f"gradient of {getattr(leaf, _NAME)!r}")


def ddp_error(what: str) -> UnsupportedOperation:
    """Return the error about a parallelized model in DistributedDataParallel."""
    return UnsupportedOperation(
        f"{what}: DistributedDataParallel and parallelize() cannot both reduce the gradients of a model. Remove "
        f"DistributedDataParallel (in Lightning: the DDP strategy): distconv sums gradients itself, and "
        f"dc.ProcessGrid(n={MPI.COMM_WORLD.size}) splits the mini-batch as DDP does"
    )


def can_defer(leaf: torch.Tensor, accumulator: Node) -> bool:
    """Return True if a contribution to the gradient of a leaf may be added at the end of backward.

    It may not where code would see that the contribution is missing: hooks on the tensor or on its node, or the caller
    of ``torch.autograd.grad``. torch does not report whether a node has hooks, but code that registered some holds a
    reference to the node, which would be gone otherwise.

    Parameters
    ----------
    leaf : Tensor
        The leaf.
    accumulator : Node
        Its AccumulateGrad node.
    """
    # First of all, while nothing in this function has taken another reference to the node.
    if sys.getrefcount(accumulator) > _unheld_references():
        return False
    if not getattr(leaf, _NAME, "") or leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None):
        return False
    try:
        return torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # torch raises it for leaves under torch.autograd.grad
        return False


def _count_references(node: Node) -> int:
    return sys.getrefcount(node)


@cache
def _probe() -> torch.Tensor:
    """Return a tensor whose graph ends in a leaf that nothing else refers to."""
    with torch.inference_mode(False), torch.enable_grad():
        return torch.zeros((), requires_grad=True).view(())


def _unheld_references() -> int:
    """Return the reference count of a node that is an argument and that only the graph holds.

    Measured at each call: where torch.compile stands between Python and its functions, there is one more reference.
    """
    return _count_references(_probe().grad_fn.next_functions[0][0])  # type: ignore[union-attr, arg-type]


# -- one backward pass ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Contribution:
    """A contribution to the gradient of ``leaf`` that is to be summed over ``comm``."""

    leaf: torch.Tensor
    grad: torch.Tensor
    comm: MPI.Intracomm
    uniquely_owned: bool
    """True if nothing else uses the memory of ``grad``, so that it may hold the sum. Otherwise it is copied."""

    @property
    def number(self) -> int:
        return int(getattr(self.leaf, _NUMBER))

    @property
    def name(self) -> str:
        return str(getattr(self.leaf, _NAME))


@dataclass(eq=False)
class _Bucket:
    """Contributions of one dtype and device that are all-reduced over one communicator in one message."""

    comm: MPI.Intracomm
    dtype: torch.dtype
    leaves: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    """The contributions to ``leaves``; after ``launch`` views of the buffer with the sums."""
    nbytes: int = 0
    reduction: Reduction | None = None
    checksums: torch.Tensor | None = None
    """The summed payload that compares the weights of ``all_leaves``, if there is one."""
    unbucketed: list[tuple[torch.Tensor, torch.Tensor, Reduction]] = field(default_factory=list)
    """Leaves whose contributions are all-reduced by themselves; their payload is in the bucket."""

    def add(self, leaf: torch.Tensor, grad: torch.Tensor, *, uniquely_owned: bool) -> None:
        """Add a contribution; start to all-reduce a large one."""
        if grad.nbytes < UNBUCKETED_BYTES:
            self.leaves.append(leaf)
            self.grads.append(grad)
            self.nbytes += grad.nbytes
            return
        # By itself on all ranks: the size decides, and not who owns the memory on one of them.
        if not uniquely_owned:
            with section("pack"):
                grad = grad.clone(memory_format=torch.contiguous_format)
        reduction = Reduction(self.comm, grad, f"gradient sum of {getattr(leaf, _NAME)}")
        self.unbucketed.append((leaf, grad, reduction))

    def launch(self, first: bool) -> None:
        """Start the all-reduce of the bucket. ``first``: it is the first bucket of this pass over ``comm``."""
        with section("pack"):
            parts = [grad.reshape(-1) for grad in self.grads]
            payload = _ChecksumPayload(self.comm, first)
            leaves = self.all_leaves
            # A replay on a GPU is a CUDA graph: the host cannot read the payload, so nothing is compared.
            compared = agreement.level != "off" and (recording.active is None or not leaves[0].is_cuda)
            if compared:
                parts.append(recording.call(payload, *leaves))
            elif agreement.level != "off":
                parts.append(payload.zeros(leaves[0]))
            if not parts:
                return
            # Concatenation widens half precision to the payload's float32. It is rounded after the sum.
            flat = torch.cat(parts)
            totals = flat.split([part.numel() for part in parts])
            self.grads = [total.view_as(grad) for total, grad in zip(totals, self.grads, strict=False)]
            self.checksums = totals[-1] if compared else None
            if compared:
                for leaf in leaves:
                    setattr(leaf, _COMPARED, self.comm.size)
        self.reduction = Reduction(self.comm, flat, f"gradient sum of {len(self.leaves)} parameters")

    @property
    def all_leaves(self) -> list[torch.Tensor]:
        """The leaves, those of ``unbucketed`` first."""
        return [*(leaf for leaf, _, _ in self.unbucketed), *self.leaves]

    def finish(self) -> None:
        """Wait for the sums and add them to ``.grad``."""
        for leaf, total, reduction in self.unbucketed:
            with section("allreduce"):
                reduction.wait()
            self._add_to_grad(leaf, total)
        if self.reduction is not None:
            with section("allreduce"):
                self.reduction.wait()
        for leaf, total in zip(self.leaves, self.grads, strict=True):
            self._add_to_grad(leaf, total)

    def _add_to_grad(self, leaf: torch.Tensor, total: torch.Tensor) -> None:
        total = total.to(self.dtype)
        grad = _GRAD.__get__(leaf)
        if grad is None:
            # Detached: autograd must not see a view of the bucket, of which torch rejects detach_().
            _GRAD.__set__(leaf, total.detach())
        else:
            grad += total

    def comparison(self) -> WeightComparison | None:
        """Return the comparison of the weights between ranks, or None if there was no payload."""
        if self.checksums is None:
            return None
        leaves = self.all_leaves
        return WeightComparison(self.comm, leaves, [getattr(leaf, _NAME) for leaf in leaves], self.checksums.real)


_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default


@dataclass(frozen=True)
class _ChecksumPayload:
    """The checksum payload of a bucket over ``comm``, computed when called with the leaves."""

    comm: MPI.Intracomm
    first: bool
    """True for the first bucket of a pass over ``comm``, which counts the pass. Otherwise the round stays.

    Passes are counted for each communicator, since some ranks may have made further passes with other ranks.
    """
    chunks: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=dict)
    """The chunks of the weights in each round. A replay, in which weights keep their memory, uses them again."""

    def __call__(self, *leaves: torch.Tensor) -> torch.Tensor:
        registry = CommunicatorRegistry.get(self.comm)
        registry.backward_passes += self.first
        round_index = registry.backward_passes % ROUNDS
        chunks = self.chunks.get(round_index)
        if chunks is None:
            chunks = select_chunks(leaves, round_index)
            if all(map(_is_dense, leaves)):  # otherwise they may be copies, which a replay would not update
                self.chunks[round_index] = chunks
        return digest_chunks(*chunks, self.comm.size)

    def zeros(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return a payload of the same length that compares nothing."""
        return leaf.new_zeros(payload_length(self.comm.size), dtype=torch.float32)


class _Backward:
    """The buckets of one backward pass.

    Only autograd's callback at the end of the pass refers to the object, so a pass that fails drops it.
    """

    def __init__(self, task: int = -1) -> None:
        self.task = task
        """Number of autograd's graph task; -1 outside of a backward pass."""
        self.open: dict[tuple[int, torch.dtype, torch.device], _Bucket] = {}
        """Buckets that still take contributions, by communicator, dtype and device."""
        self.launched: list[_Bucket] = []
        """Buckets whose all-reduce has started, in the same order on all ranks."""
        self._launched_over: set[int] = set()
        """Handles of the communicators over which a bucket was launched."""
        self._ordered: dict[int, OrderedContributions[_Contribution]] = {}

    def has_pending(self, leaf: torch.Tensor) -> bool:
        """Return True if something remains to be added to ``leaf.grad``."""
        if any(ordered.is_waiting(leaf) for ordered in self._ordered.values()):
            return True
        return any(leaf is each for bucket in (*self.open.values(), *self.launched) for each in bucket.all_leaves)

    def add(self, leaf: torch.Tensor, grad: torch.Tensor, comm: MPI.Intracomm, *, uniquely_owned: bool = False) -> None:
        """Add a contribution, and put those whose turn it is into buckets."""
        ordered = self._ordered.get(comm.handle)
        if ordered is None:
            ordered = self._ordered[comm.handle] = OrderedContributions(comm)
        for contribution in ordered.add(_Contribution(leaf, grad, comm, uniquely_owned)):
            self._add_to_bucket(contribution)

    def _add_to_bucket(self, new: _Contribution) -> None:
        key = (new.comm.handle, new.grad.dtype, new.grad.device)
        bucket = self.open.setdefault(key, _Bucket(new.comm, new.grad.dtype))
        bucket.add(new.leaf, new.grad, uniquely_owned=new.uniquely_owned)
        if bucket.nbytes >= BUCKET_BYTES:
            self._launch(key)

    def _launch(self, key: tuple[int, torch.dtype, torch.device]) -> None:
        bucket = self.open.pop(key)
        self.launched.append(bucket)
        bucket.launch(bucket.comm.handle not in self._launched_over)
        self._launched_over.add(bucket.comm.handle)

    def finish(self) -> None:
        """Add all contributions, with the unsynced ones, to ``.grad``, and end the pass."""
        unsynced = unsynced_grads()
        _unsynced.clear()
        for leaf, grad, comm in unsynced:
            self.add(leaf, grad, comm)
        self.finish_pending()
        _running.pop(self.task, None)
        _update_grad_property()

    def finish_pending(self) -> None:
        """Reduce the contributions that have arrived, and add them to ``.grad``."""
        # The order of communicators matters: ranks that wait for each other over different ones would deadlock.
        for ordered in sorted(self._ordered.values(), key=lambda ordered: creation_order(ordered.comm)):
            for contribution in ordered.rest():
                self._add_to_bucket(contribution)
        self._ordered.clear()
        # In the order of their first contribution, which is the same on all ranks because contributions are ordered.
        for key in list(self.open):
            self._launch(key)
        # Those of earlier passes, of which the GPU has the sums by now.
        comparisons = [_deferred_comparisons.pop(0) for _ in range(len(_deferred_comparisons))]
        with torch.no_grad():
            while self.launched:
                # It stays in the list until its wait returns: if that raises, __del__ keeps its buffer for MPI.
                self.launched[0].finish()
                comparison = self.launched.pop(0).comparison()
                if comparison is not None:
                    (_deferred_comparisons if comparison.is_deferred else comparisons).append(comparison)
        # Last: a mismatch raises, and the gradients of this pass are complete by then.
        for comparison in comparisons:
            comparison.check()

    def __del__(self) -> None:
        _running.pop(self.task, None)
        _update_grad_property()
        # MPI may still write to the buffers of reductions that a failed backward pass has started.
        _abandoned.extend([*self.launched, *(bucket for bucket in self.open.values() if bucket.unbucketed)])


_running: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()
"""Backward passes that have contributions, by autograd's graph task."""
_abandoned: list[_Bucket] = []
"""Buckets of failed backward passes, to whose buffers MPI may still write. They are never freed."""
_deferred_comparisons: list[WeightComparison] = []
"""Comparisons of weights on a GPU, which the next pass makes: the host would have to wait for the GPU now."""


def enqueue_contribution(leaf: torch.Tensor, grad: torch.Tensor, comm: MPI.Intracomm, *, uniquely_owned: bool) -> None:
    """Add the sum of a contribution over the ranks to ``leaf.grad`` before the running backward pass returns.

    Under :func:`no_sync` the contribution stays on this rank until the next pass, or until ``.grad`` is read.
    Collective: call on every rank, in any order of leaves.

    Parameters
    ----------
    leaf : Tensor
        Marked by :func:`defer_grad_reduction`.
    grad : Tensor
        This rank's contribution to its gradient.
    comm : MPI.Intracomm
        The ranks to sum over.
    uniquely_owned : bool
        True if nothing else uses the memory of ``grad``, so that it may hold the sum. Otherwise it is not changed.
    """
    if _no_sync:
        _add_unsynced(leaf, grad, comm)
        return
    task: int = torch._C._current_graph_task_id()
    backward = _running.get(task)
    if backward is None:
        backward = _running[task] = _Backward(task)
        _update_grad_property()
        # Once for each pass, at its first contribution. Autograd calls it before backward() returns.
        torch.autograd.Variable._execution_engine.queue_callback(backward.finish)
    backward.add(leaf, grad, comm, uniquely_owned=uniquely_owned)


# -- gradient accumulation --------------------------------------------------------------------------------------------

_no_sync = False
"""True inside :func:`no_sync`. A plain global: on a GPU autograd runs backward in threads of its own."""


@dataclass(eq=False)
class _UnsyncedGrad:
    """Contributions of this rank to the gradient of ``leaf`` that remain to be summed, for each communicator."""

    leaf: torch.Tensor
    grads: dict[int, tuple[torch.Tensor, MPI.Intracomm]] = field(default_factory=dict)
    """By the communicator's handle."""


_unsynced: dict[int, _UnsyncedGrad] = {}
"""Unsynced gradients by the leaf's id, in the order of their first contribution, which is the same on all ranks.

Strong references to the leaves, even if nothing else uses them any more: Python frees a model at a different time on
each rank, and the ranks would disagree on what remains to be summed.
"""


@contextmanager
def no_sync() -> Iterator[None]:
    """Keep gradients of parameters on each rank; the next backward pass outside sums them over the ranks.

    For gradient accumulation over micro-batches, as ``DistributedDataParallel.no_sync``. Enter and leave it on every
    rank. Code that reads a ``.grad`` earlier (an optimizer, clipping, ``zero_grad``, a print) gets the sum, as in a
    single process.

    Warnings
    --------
    Reading a ``.grad`` inside is collective: a rank that does so alone waits for the others forever.

    Examples
    --------
    >>> with dc.no_sync():                        # doctest: +SKIP
    ...     F.cross_entropy(model(x1), t1).backward()
    >>> F.cross_entropy(model(x2), t2).backward()  # doctest: +SKIP
    """
    global _no_sync
    before, _no_sync = _no_sync, True
    try:
        yield
    finally:
        _no_sync = before


def is_no_sync() -> bool:
    """Return True inside :func:`no_sync`."""
    return _no_sync


def _add_unsynced(leaf: torch.Tensor, grad: torch.Tensor, comm: MPI.Intracomm) -> None:
    grads = _unsynced.setdefault(id(leaf), _UnsyncedGrad(leaf)).grads
    _update_grad_property()
    with torch.no_grad():
        before = grads.get(comm.handle)
        # A copy, since autograd or a hook may still write to the gradient. Not in place: others may hold the last sum.
        grads[comm.handle] = (grad.clone() if before is None else before[0] + grad, comm)


UnsyncedGrads = list[tuple[torch.Tensor, torch.Tensor, MPI.Intracomm]]
"""Leaves, contributions of this rank to their gradients, and the communicators over which these remain to be summed."""


def unsynced_grads() -> UnsyncedGrads:
    """Return the contributions that :func:`no_sync` has kept on this rank.

    Returns
    -------
    UnsyncedGrads
        In the order in which they came, which is the same on all ranks.
    """
    return [(each.leaf, grad, comm) for each in _unsynced.values() for grad, comm in each.grads.values()]


def set_unsynced_grads(grads: UnsyncedGrads) -> None:
    """Replace the contributions that :func:`no_sync` has kept on this rank. Call it on every rank.

    Parameters
    ----------
    grads : UnsyncedGrads
        As :func:`unsynced_grads` returns them, with the same leaves in the same order on all ranks.
    """
    _unsynced.clear()
    for leaf, grad, comm in grads:
        _unsynced.setdefault(id(leaf), _UnsyncedGrad(leaf)).grads[comm.handle] = grad, comm
    _update_grad_property()


# -- reads of .grad while something is pending ------------------------------------------------------------------------


def synchronize_grads(leaf: torch.Tensor) -> None:
    """Complete ``leaf.grad``, and with it all other gradients, if contributions to it are unsynced or in flight.

    Collective: call on every rank.

    Parameters
    ----------
    leaf : Tensor
        A parameter, or this rank's block of it.
    """
    _finish_running(leaf)
    if id(leaf) in _unsynced:
        _Backward().finish()


def discard_pending(leaf: torch.Tensor) -> None:
    """Discard contributions to ``leaf.grad`` that remain to be added, because the gradient gets another value.

    Collective: call on every rank, since reductions in flight must be finished.

    Parameters
    ----------
    leaf : Tensor
        A parameter, or this rank's block of it.
    """
    _finish_running(leaf)
    unsynced = _unsynced.get(id(leaf))
    if unsynced is not None:
        unsynced.grads.clear()


def _finish_running(leaf: torch.Tensor) -> None:
    # A copy of the list: finish_pending() may end a pass and remove it.
    for backward in list(_running.values()):
        if backward.has_pending(leaf):
            backward.finish_pending()


_GRAD: Any = torch.Tensor.grad
"""torch's own attribute ``grad``. Reading it does not finish pending contributions."""


def _update_grad_property() -> None:
    """Intercept reads of ``Parameter.grad`` as long as contributions to any parameter are pending, and no longer."""
    # A property in Python slows down every access, so it exists only while it is needed.
    if not (_unsynced or _running):
        if "grad" in vars(torch.nn.Parameter):
            del torch.nn.Parameter.grad
    elif "grad" not in vars(torch.nn.Parameter):
        torch.nn.Parameter.grad = property(_get_grad, _set_grad, _delete_grad)  # type: ignore[assignment]


def _get_grad(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    synchronize_grads(parameter)
    grad: torch.Tensor | None = _GRAD.__get__(parameter)
    return grad


def _set_grad(parameter: torch.nn.Parameter, grad: torch.Tensor | None) -> None:
    discard_pending(parameter)
    torch.Tensor.grad.__set__(parameter, grad)  # type: ignore[union-attr]


def _delete_grad(parameter: torch.nn.Parameter) -> None:
    _set_grad(parameter, None)
