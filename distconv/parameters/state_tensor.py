"""What state dicts hold of sharded parameters: whole plain tensors on which changes in place pass both ways.

In one process the tensors of ``state_dict()`` are the parameters' memory: moving averages, surgery on weights and
resets of an optimizer write into them. Here they are copies that know whose. What a call changes in one is written back
to the block, and one whose parameter has been changed since is gathered again when anybody looks at its values.
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
from distconv.tensor import DistTensor, laid_out

_WITHOUT_VALUES = METADATA | {
    *(
        vars(torch._C.TensorBase)[name].__get__
        for name in "shape dtype device ndim requires_grad is_leaf grad_fn".split()
    ),
    torch.Tensor.__len__,
    torch.Tensor.stride,
}
"""What may be asked of a tensor on one rank alone."""


class _Memory:
    """The whole of the sharded ``source``: what a StateTensor and its views have in common."""

    def __init__(self, source: DistTensor) -> None:
        # Inference tensors do not count what is changed in them.
        with torch.inference_mode(False), torch.no_grad():
            self.source, self.whole = source, source.gather()
        self._seen = self._changes()

    def _changes(self) -> int:
        return 0 if self.source._memory is None else int(self.source._memory.changes)

    @property
    def stale(self) -> bool:
        """Whether the source has been changed since."""
        return self._seen != self._changes()

    def refresh(self) -> None:
        """Have the values of the source. Collective if it has been changed."""
        if self.stale:
            with torch.no_grad():
                self.whole.copy_(self.source.gather())
            self._seen = self._changes()

    def write_back(self) -> None:
        """Let the source have the values of the whole."""
        x = self.source
        with torch.no_grad():
            x.copy_(laid_out(self.whole, x.dist))
        self._seen = self._changes()

    def tensor(self, values: torch.Tensor) -> StateTensor:
        """``values``, the whole or a view of it, as others get it."""
        tensor = values.as_subclass(StateTensor)
        tensor.memory = self
        return tensor

    def handed_out(self, result: Any) -> Any:
        """``result`` of a call, as a StateTensor if it lies in the memory of the whole."""
        if isinstance(result, np.ndarray) and np.may_share_memory(result, self.whole.numpy()):
            # Nobody would see what is written into it.
            result.flags.writeable = False
        return self.tensor(result) if type(result) is torch.Tensor and self._holds(result) else result

    def _holds(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or not tensor.numel():
            return False
        return bool(tensor.untyped_storage().data_ptr() == self.whole.untyped_storage().data_ptr())


class StateTensor(torch.Tensor):
    """A whole plain tensor that stands for a sharded one, or a view of such a tensor. Copies of it are plain."""

    memory: _Memory

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """``func`` of plain tensors; what it has changed is written back."""
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        given = [x for x in leaves if isinstance(x, StateTensor)]
        memories = list({id(x.memory): x.memory for x in given}.values())
        for memory in memories:
            memory.refresh()
        before = [_version(x) for x in given]
        if any(isinstance(x, DistTensor) for x in leaves):
            twins = {id(x): _replicated(_plain(x), x.memory.source) for x in given}
            args, kwargs = map_leaves(lambda x: twins.get(id(x), x), (tuple(args), kwargs))
            own = {id(twins[id(x)]): x for x in given}
            result = map_leaves(lambda y: own.get(id(y), y), func(*args, **(kwargs or {})))
        else:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
        changed = {x.memory for x, version in zip(given, before, strict=True) if _version(x) != version}
        for memory in changed | _written_uncounted(func, args):
            memory.write_back()
        return result if result is None else map_leaves(lambda y: _handed_out(y, memories), result)

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.memory.stale:
            raise UnsupportedOperation(
                "saving a state_dict() of sharded parameters that have been changed since it was taken: on all ranks "
                "take it anew before one of them saves it, or copy.deepcopy() it when it is taken to keep what it was"
            )
        return _plain(self).__reduce_ex__(protocol)


DistTensor.gives_way_to.add(StateTensor)


def _replicated(values: torch.Tensor, like: DistTensor) -> DistTensor:
    return DistTensor(values, Distribution(like.grid, (None,) * values.dim()), values.shape)


def _plain(tensor: StateTensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _version(tensor: StateTensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor._version


def _written_uncounted(func: Any, args: Sequence[Any]) -> set[_Memory]:
    """What ``func`` writes without counting it as a change: a GPU's kernels for lists of tensors do not."""
    if not (func.__name__.startswith("_foreach_") and func.__name__.endswith("_")):
        return set()
    return {x.memory for x in args[0] if isinstance(x, StateTensor)}


def _handed_out(result: Any, memories: Sequence[_Memory]) -> Any:
    for memory in memories:
        result = memory.handed_out(result)
    return result


def whole_of(value: Any) -> Any:
    """What a state dict holds of ``value``: of a DistTensor the whole. Collective."""
    if not isinstance(value, DistTensor):
        return value
    detached: Any = value.detach()
    memory = _Memory(detached)
    return memory.tensor(memory.whole)
