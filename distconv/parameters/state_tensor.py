"""Entries of state dicts for sharded parameters: full plain tensors that stay linked to the parameters.

In a single process the tensors of ``state_dict()`` share the parameters' memory, and code such as moving averages or a
reset of an optimizer writes into them. Here they are gathered copies. A change of an entry is written back to the
block, and an entry is gathered again before its values are read if the parameter has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from distconv.dispatch import METADATA, map_leaves
from distconv.distribution import Distribution
from distconv.errors import UnsupportedOperation
from distconv.tensor import DistTensor, to_distribution

_WITHOUT_VALUES = METADATA | {
    *(
        vars(torch._C.TensorBase)[name].__get__
        for name in "shape dtype device ndim requires_grad is_leaf grad_fn".split()
    ),
    torch.Tensor.__len__,
    torch.Tensor.stride,
}
"""Functions that read no values, and may thus be called on one rank alone."""


class _Memory:
    """The full tensor of the sharded ``source``, which a StateTensor and its views share."""

    def __init__(self, source: DistTensor) -> None:
        # Inference tensors have no version counter, on which the detection of changes relies.
        with torch.inference_mode(False), torch.no_grad():
            self.source, self.full = source, source.gather()
        self._seen = self._count_changes()

    def _count_changes(self) -> int:
        """Return the number of in-place changes of the source's memory. Without shared memory none was recorded."""
        return 0 if self.source._memory is None else int(self.source._memory.changes)

    @property
    def stale(self) -> bool:
        """True if the source has changed since it was gathered. Otherwise ``full`` is up to date."""
        return self._seen != self._count_changes()

    def refresh(self) -> None:
        """Gather the source again if it has changed. Collective in this case."""
        if self.stale:
            with torch.no_grad():
                self.full.copy_(self.source.gather())
            self._seen = self._count_changes()

    def write_back(self) -> None:
        """Copy this rank's block of the full values to the source. No communication."""
        x = self.source
        with torch.no_grad():
            x.copy_(to_distribution(self.full, x.dist))
        self._seen = self._count_changes()

    def wrap(self, values: torch.Tensor) -> StateTensor:
        """Return ``values``, the full tensor or a view of it, as a StateTensor."""
        tensor = values.as_subclass(StateTensor)
        tensor.memory = self
        return tensor

    def wrap_result(self, result: Any) -> Any:
        """Return the result of a call, as a StateTensor if it shares memory with the full tensor."""
        if isinstance(result, np.ndarray) and np.may_share_memory(result, self.full.numpy()):
            # A write through NumPy would not be noticed, and not be written back.
            result.flags.writeable = False
        if type(result) is not torch.Tensor or result.layout is not torch.strided or not result.numel():
            return result
        shares_memory = result.untyped_storage().data_ptr() == self.full.untyped_storage().data_ptr()
        return self.wrap(result) if shares_memory else result


class StateTensor(torch.Tensor):
    """A full plain tensor that is linked to a sharded one, or a view of such a tensor. Copies are plain tensors.

    Warnings
    --------
    Make the same changes on all ranks. Each rank writes its own block from its own copy, without messages. A change on
    some ranks only leaves the other blocks, and replicas, as they were.
    """

    memory: _Memory

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` with plain tensors and write changes back. Collective if values are involved."""
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        given = [x for x in leaves if isinstance(x, StateTensor)]
        memories = list({id(x.memory): x.memory for x in given}.values())
        # Before the versions are counted, since a refresh writes to the full tensor, too.
        for memory in memories:
            memory.refresh()
        before = [_version(x) for x in given]
        if any(isinstance(x, DistTensor) for x in leaves):
            # The operator takes the full tensors as replicated DistTensors on the same memory, so that in-place changes
            # reach them. In its results they are StateTensors again.
            twins = {id(x): _replicated(_plain(x), x.memory.source) for x in given}
            args, kwargs = map_leaves(lambda x: twins.get(id(x), x), (tuple(args), kwargs))
            own = {id(twins[id(x)]): x for x in given}
            result = map_leaves(lambda y: own.get(id(y), y), func(*args, **(kwargs or {})))
        else:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
        # A version counter increases with each write, also through a view.
        changed = {x.memory for x, version in zip(given, before, strict=True) if _version(x) != version}
        for memory in changed | _written_uncounted(func, args):
            memory.write_back()
        return result if result is None else map_leaves(lambda y: _wrap_result(y, memories), result)

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.memory.stale:
            # Pickling runs on one rank, which cannot gather.
            raise UnsupportedOperation(
                "saving a state_dict() of sharded parameters that have changed since it was taken. Call state_dict() "
                "again on all ranks before one of them saves it, or copy.deepcopy() it when it is taken"
            )
        return _plain(self).__reduce_ex__(protocol)


DistTensor.defers_to.add(StateTensor)


def _replicated(values: torch.Tensor, like: DistTensor) -> DistTensor:
    """Return ``values`` as a replicated DistTensor on the grid of ``like``, on the same memory."""
    return DistTensor(values, Distribution(like.grid, (None,) * values.dim()), values.shape)


def _plain(tensor: StateTensor) -> torch.Tensor:
    """Return the tensor as a plain one on the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _version(tensor: StateTensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor._version


def _written_uncounted(func: Any, args: Sequence[Any]) -> set[_Memory]:
    """Return the memories that ``func`` modifies without increasing a version counter.

    GPU kernels for lists of tensors (``_foreach_*_``) do so.
    """
    if not (func.__name__.startswith("_foreach_") and func.__name__.endswith("_")):
        return set()
    return {x.memory for x in args[0] if isinstance(x, StateTensor)}


def _wrap_result(result: Any, memories: Sequence[_Memory]) -> Any:
    for memory in memories:
        result = memory.wrap_result(result)
    return result


def gather_state_tensor(value: Any) -> Any:
    """Return the entry of a state dict for ``value``.

    Collective: call on every rank.

    Parameters
    ----------
    value : object
        A DistTensor is gathered.

    Returns
    -------
    object
        A :class:`StateTensor`, or ``value`` if it is not a DistTensor.
    """
    if not isinstance(value, DistTensor):
        return value
    # Detached: an entry of a state dict is not part of the graph.
    detached: Any = value.detach()
    memory = _Memory(detached)
    return memory.wrap(memory.full)
