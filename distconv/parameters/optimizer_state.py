"""Optimizer state split over the ranks: each updates some of the parameters that all of them hold, for all.

Parameters are dealt out whole, the largest first, each to the rank that has least, so that any optimizer is exact that
looks at one parameter at a time. In ``optimizer.step()``

    1  a rank hides the gradients of the parameters that are not its own: torch's optimizers pass over those, and make
       no state for them
    2  it updates its own
    3  the gradients come back, and updated weights go from their owners to the others

Gradients are summed in their buckets behind the backward pass as ever, and are whole everywhere: whoever clips, scales
or looks at them finds what one process has. Reduced to the owners alone they would not be, and half the volume that
this saved is what step 3 sends.

What is sharded over ``c`` stays as it is: operators on DistTensors are calls of all ranks together.

Source: Rajbhandari et al. 2020 (ZeRO), stage 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from mpi4py import MPI
from torch.optim import LBFGS, Optimizer

from distconv.communication.agreement import check_same_on_all_ranks
from distconv.communication.digest import find_differing
from distconv.communication.transport import Exchange
from distconv.errors import MismatchError, UnsupportedOperation
from distconv.process import watchdog
from distconv.tensor import DistTensor

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

MESSAGE_BYTES = 4 << 20
"""Updated weights travel in messages of about this much, or of one parameter."""


def shard_optimizer(optimizer: AnyOptimizer, comm: MPI.Intracomm | None = None) -> AnyOptimizer:
    """Let each rank keep the state of a part of the parameters, and update it for all; returns the same. Collective.

    To be called once, after ``parallelize``, with any of torch's optimizers but LBFGS, over the ranks of ``comm``
    (default: all) that train the model. Numbers stay those of one process; so do ``state_dict()``, which is then
    collective, what it loads, and checkpoints: they have the whole state. ``optimizer.state`` has this rank's part.
    Parameters that are sharded over ``c``, and their state with them, are not split further. What a step writes
    into gradients (Nesterov's with ``foreach``) reaches those of this rank's parameters alone. A deep copy is not
    split, and has this rank's part of the state alone: make another optimizer, and load the ``state_dict()`` into it.

    Raises
    ------
    UnsupportedOperation
        If the optimizer is not torch's, or looks at all parameters together.
    MismatchError
        On all ranks, if the parameters are not the same on all of them.
    """
    comm = comm or MPI.COMM_WORLD
    kind = type(optimizer)
    parameters = _parameters(optimizer)
    check_same_on_all_ranks(
        comm, "shard_optimizer", f"{kind.__name__} of {[(tuple(p.shape), str(p.dtype)) for p in parameters]}"
    )
    if isinstance(optimizer, LBFGS) or not kind.step.__module__.startswith("torch.optim."):
        raise UnsupportedOperation(
            f"shard_optimizer: {kind.__module__}.{kind.__qualname__} may look at several parameters at once, of which "
            "a rank would have a part only; use one of torch.optim (not LBFGS), or keep its state whole"
        )
    if comm.size == 1 or split_of(optimizer) is not None:
        return optimizer
    plain = {str(number): p for number, p in enumerate(parameters) if not isinstance(p, DistTensor)}
    wrong = find_differing(comm, plain, "shard_optimizer")
    if wrong:
        raise MismatchError(
            f"shard_optimizer: {len(wrong)} of {len(plain)} whole parameters differ between ranks, the first is number "
            f"{next(iter(wrong))}; parallelize the model before"
        )
    split = StateSplit(optimizer, comm)
    optimizer.register_step_pre_hook(split.before)
    optimizer.register_step_post_hook(split.after)
    optimizer.register_state_dict_post_hook(split.in_state_dict, prepend=True)
    optimizer.register_load_state_dict_post_hook(split.deal)
    return optimizer


def split_of(optimizer: Optimizer) -> StateSplit | None:
    """How the state of ``optimizer`` is split, if it is."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return next((owner for owner in owners if isinstance(owner, StateSplit)), None)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _whole_ones(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for parameter in _parameters(optimizer) if not isinstance(parameter, DistTensor)]


class StateSplit:
    """Which rank has the state of which parameter of an optimizer. :func:`shard_optimizer` makes it."""

    def __init__(self, optimizer: Optimizer, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._owners: dict[torch.Tensor, int] = {}
        self._loads = [0] * comm.size
        """Elements that each rank owns."""
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._stepped: list[torch.Tensor] = []
        self.deal(optimizer)

    def owned(self, parameter: torch.Tensor) -> bool:
        """Whether this rank has the state of ``parameter``."""
        return isinstance(parameter, DistTensor) or self._owners[parameter] == self._comm.rank

    def deal(self, optimizer: Optimizer) -> None:
        """Give parameters that have no owner yet one, and drop what state this rank has of others' parameters."""
        parameters = _whole_ones(optimizer)
        # Alike on all ranks: sorting leaves equal ones in their order.
        for parameter in sorted((p for p in parameters if p not in self._owners), key=lambda p: -p.numel()):
            self._owners[parameter] = least = self._loads.index(min(self._loads))
            self._loads[least] += parameter.numel()
        for parameter in parameters:
            if not self.owned(parameter):
                optimizer.state.pop(parameter, None)

    # -- a step -------------------------------------------------------------------------------------------------------

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Hook before a step: leaves it the gradients of this rank's own parameters, now or behind a closure."""
        self.deal(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._hide(optimizer)
            return None

        def evaluated() -> Any:
            self._show()
            with torch.enable_grad():
                loss = closure()
            self._hide(optimizer)
            return loss

        self._hidden = []
        return args[:1], {**kwargs, "closure": evaluated}

    def _hide(self, optimizer: Optimizer) -> None:
        # All of them are asked for, in the same order: those that no_sync has kept are summed then.
        gradients = [(parameter, parameter.grad) for parameter in _parameters(optimizer)]
        stepped = [(parameter, gradient) for parameter, gradient in gradients if gradient is not None]
        self._stepped = [parameter for parameter, _ in stepped if not isinstance(parameter, DistTensor)]
        self._hidden = [(parameter, gradient) for parameter, gradient in stepped if not self.owned(parameter)]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def _show(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def after(self, *_: Any) -> None:
        """Hook behind a step: gives back gradients, and brings updated weights from their owners."""
        self._show()
        alike: dict[Any, list[list[torch.Tensor]]] = {}
        for parameter in self._stepped:
            owned = alike.setdefault((parameter.dtype, parameter.device), [[] for _ in self._loads])
            owned[self._owners[parameter]].append(parameter)
        self._stepped = []
        with torch.no_grad():
            for owned in alike.values():
                for buckets in zip_longest(*map(_buckets, owned), fillvalue=()):
                    _send(self._comm, buckets)

    # -- state dicts --------------------------------------------------------------------------------------------------

    def whole(self, optimizer: Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
        """The state of all parameters that have any, what is sharded as it is. Collective."""
        self.deal(optimizer)
        with watchdog.waiting(lambda: "optimizer state"):
            states = {parameter: self._state(optimizer, parameter) for parameter in _parameters(optimizer)}
        return {parameter: state for parameter, state in states.items() if state}

    def _state(self, optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
        held = optimizer.state.get(parameter, {}) if self.owned(parameter) else {}
        if isinstance(parameter, DistTensor):
            return held
        on_host = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in held.items()}
        sent = self._comm.bcast(on_host, self._owners[parameter])
        return held or {key: _beside(value, parameter) for key, value in sent.items()}

    def in_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hook of ``state_dict()``: the state of all parameters."""
        states = self.whole(optimizer)
        numbers = {parameter: number for number, parameter in enumerate(_parameters(optimizer))}
        return {**state_dict, "state": {numbers[parameter]: {**entries} for parameter, entries in states.items()}}


def _beside(value: Any, parameter: torch.Tensor) -> Any:
    # torch keeps a count of steps on the CPU, the rest beside the parameter.
    return value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value


# -- messages ---------------------------------------------------------------------------------------------------------


def _buckets(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    for parameter in parameters:
        bucket.append(parameter)
        if sum(each.nbytes for each in bucket) >= MESSAGE_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _send(comm: MPI.Intracomm, buckets: Sequence[Sequence[torch.Tensor]]) -> None:
    """Bring each rank's bucket to all others."""
    like = next(bucket for bucket in buckets if bucket)[0]
    sizes = [[parameter.numel() for parameter in bucket] for bucket in buckets]
    flat = [like.new_empty(sum(each)) for each in sizes]
    if buckets[comm.rank]:
        torch.cat([parameter.detach().reshape(-1) for parameter in buckets[comm.rank]], out=flat[comm.rank])
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sends = [(rank, flat[comm.rank]) for rank in others if flat[comm.rank].numel()]
    receives = [(rank, flat[rank]) for rank in others if flat[rank].numel()]
    Exchange(comm, sends, receives, "updated weights").wait()
    for rank in others:
        for parameter, values in zip(buckets[rank], flat[rank].split(sizes[rank]), strict=True):
            parameter.copy_(values.view_as(parameter))
