"""Optimizer state sharded over ranks that hold the same parameters (ZeRO, stage 1).

Complete parameters are assigned to ranks, the largest first, each to the rank with the fewest elements. Any optimizer
that updates one parameter at a time therefore stays exact. ``optimizer.step()`` consists of::

    1  before_step  hide the gradients of parameters of other ranks, which torch's optimizers then skip
    2  step         update this rank's parameters
    3  after_step   restore the gradients, and send updated parameters from their owners to all ranks

Gradients are all-reduced in buckets during backward, as without sharding, and are complete on every rank: code that
clips, scales or reads them works as in a single process. A reduce-scatter would halve the volume of this step, but step
3 sends that half, and such code would break.

Parameters that are sharded over ``c`` are not split further. Operators on DistTensors are collective, so every rank
updates its block.

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
"""Size of the messages with updated parameters, unless a single parameter is larger."""


def shard_optimizer(optimizer: AnyOptimizer, comm: MPI.Intracomm | None = None) -> AnyOptimizer:
    """Shard the state of an optimizer over ranks.

    Each rank keeps the state of a part of the parameters and updates it for all ranks. Results are those of a single
    process. ``optimizer.state`` has this rank's part. ``state_dict()`` and checkpoints have the full state, and
    ``state_dict()`` is collective. Parameters that are sharded over ``c``, and their state, are not split further.

    Collective: call on every rank, once, after ``parallelize``.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        An optimizer of ``torch.optim``, except LBFGS.
    comm : MPI.Intracomm, optional
        The ranks that train the model (default: ``MPI.COMM_WORLD``).

    Returns
    -------
    torch.optim.Optimizer
        The same ``optimizer``.

    Raises
    ------
    UnsupportedOperation
        If the optimizer is not of ``torch.optim``, or is LBFGS, which uses all parameters together.
    MismatchError
        On every rank, if the parameters differ between ranks.

    Warnings
    --------
    If a step modifies gradients, as Nesterov momentum with ``foreach`` does, the gradients of other ranks' parameters
    do not change. A deep copy of the optimizer is not sharded and has only this rank's part of the state: make a new
    optimizer and load the ``state_dict()`` into it instead.

    Examples
    --------
    >>> import torch, distconv as dc
    >>> model = dc.parallelize(torch.nn.Linear(3, 2), dc.ProcessGrid(n=1))
    >>> optimizer = dc.shard_optimizer(torch.optim.Adam(model.parameters()))
    """
    comm = comm or MPI.COMM_WORLD
    kind = type(optimizer)
    parameters = _parameters(optimizer)
    # First of all: the checks below depend on arguments, and could raise on one rank alone.
    check_same_on_all_ranks(
        comm, "shard_optimizer", f"{kind.__name__} of {[(tuple(p.shape), str(p.dtype)) for p in parameters]}"
    )
    if isinstance(optimizer, LBFGS) or not kind.step.__module__.startswith("torch.optim."):
        raise UnsupportedOperation(
            f"shard_optimizer: {kind.__module__}.{kind.__qualname__} may use several parameters at once, of which a "
            "rank would have only some. Use an optimizer of torch.optim (not LBFGS), or do not shard its state."
        )
    if comm.size == 1 or split_of(optimizer) is not None:
        return optimizer
    plain = {str(number): p for number, p in enumerate(parameters) if not isinstance(p, DistTensor)}
    wrong = find_differing(comm, plain, "shard_optimizer")
    if wrong:
        raise MismatchError(
            f"shard_optimizer: {len(wrong)} of {len(plain)} replicated parameters differ between ranks, the first is "
            f"number {next(iter(wrong))}. Call parallelize on the model first."
        )
    split = StateSplit(optimizer, comm)
    optimizer.register_step_pre_hook(split.before_step)
    optimizer.register_step_post_hook(split.after_step)
    # Before hooks of the user, which get the state of all parameters.
    optimizer.register_state_dict_post_hook(split.fill_state_dict, prepend=True)
    optimizer.register_load_state_dict_post_hook(split.assign_owners)
    return optimizer


def split_of(optimizer: Optimizer) -> StateSplit | None:
    """Return the sharding of an optimizer's state, or None if it is not sharded.

    Parameters
    ----------
    optimizer : Optimizer
        Optimizer, sharded or not.

    Returns
    -------
    StateSplit or None
    """
    hooks = optimizer._optimizer_step_pre_hooks.values()
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return next((owner for owner in owners if isinstance(owner, StateSplit)), None)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class StateSplit:
    """The assignment of parameters to the ranks that hold their optimizer state. :func:`shard_optimizer` makes it."""

    def __init__(self, optimizer: Optimizer, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._owners: dict[torch.Tensor, int] = {}
        """The rank that has the state of each plain parameter; the same on all ranks."""
        self._owned_elements = [0] * comm.size
        """Elements that each rank owns."""
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Other ranks' parameters and their gradients, which are hidden during a step."""
        self._stepped: list[torch.Tensor] = []
        """Plain parameters with a gradient in this step, which their owners update and send."""
        self.assign_owners(optimizer)

    def is_owned(self, parameter: torch.Tensor) -> bool:
        """Return True if this rank has the state of ``parameter``.

        Parameters
        ----------
        parameter : Tensor
            Parameter of the optimizer.

        Returns
        -------
        bool
        """
        # Of a DistTensor every rank has a block, and updates it.
        return isinstance(parameter, DistTensor) or self._owners[parameter] == self._comm.rank

    def assign_owners(self, optimizer: Optimizer) -> None:
        """Assign new parameters to ranks, and drop the state of other ranks' parameters.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            Its parameters must be identical on all ranks, so that all compute the same assignment.
        """
        parameters = [parameter for parameter in _parameters(optimizer) if not isinstance(parameter, DistTensor)]
        # Identical on all ranks, because sorted() is stable.
        for parameter in sorted((p for p in parameters if p not in self._owners), key=lambda p: -p.numel()):
            self._owners[parameter] = least = self._owned_elements.index(min(self._owned_elements))
            self._owned_elements[least] += parameter.numel()
        for parameter in parameters:
            if not self.is_owned(parameter):
                optimizer.state.pop(parameter, None)

    # -- a step -------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Pre-hook of ``step``: hide gradients of other ranks' parameters, after the closure if there is one.

        Parameters
        ----------
        optimizer : Optimizer
            Optimizer whose ``step`` is called.
        args : object
            Positional arguments of ``step``.
        kwargs : object
            Keyword arguments of ``step``.

        Returns
        -------
        tuple[object, object] or None
        """
        self.assign_owners(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._hide_gradients(optimizer)
            return None

        def evaluate_and_hide() -> Any:
            # The closure may read or clear all gradients, those of other ranks' parameters, too.
            self._restore_gradients()
            with torch.enable_grad():
                loss = closure()
            self._hide_gradients(optimizer)
            return loss

        # Gradients that a failed step has left hidden belong to that step.
        self._hidden = []
        return args[:1], {**kwargs, "closure": evaluate_and_hide}

    def _hide_gradients(self, optimizer: Optimizer) -> None:
        # Reading .grad all-reduces gradients that no_sync left unreduced. All ranks must read all of them, in the same
        # order.
        gradients = [(parameter, parameter.grad) for parameter in _parameters(optimizer)]
        stepped = [(parameter, gradient) for parameter, gradient in gradients if gradient is not None]
        self._stepped = [parameter for parameter, _ in stepped if not isinstance(parameter, DistTensor)]
        self._hidden = [(parameter, gradient) for parameter, gradient in stepped if not self.is_owned(parameter)]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def _restore_gradients(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def after_step(self, *_: Any) -> None:
        """Post-hook of ``step``: restore gradients, and send updated parameters from their owners. Collective."""
        self._restore_gradients()
        by_dtype: dict[Any, list[list[torch.Tensor]]] = {}
        for parameter in self._stepped:
            owned = by_dtype.setdefault((parameter.dtype, parameter.device), [[] for _ in self._owned_elements])
            owned[self._owners[parameter]].append(parameter)
        self._stepped = []
        with torch.no_grad():
            for owned in by_dtype.values():
                # Owners send at the same time, a bucket each. All ranks compute the same rounds from the same owners.
                for buckets in zip_longest(*map(_buckets, owned), fillvalue=()):
                    _exchange_buckets(self._comm, buckets)

    # -- state dicts --------------------------------------------------------------------------------------------------

    def gather_state(self, optimizer: Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the state of all parameters that have any; that of sharded parameters stays sharded.

        Collective: call on every rank.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            Optimizer of this split.

        Returns
        -------
        dict of Tensor to dict
            The state by parameter.
        """
        self.assign_owners(optimizer)
        with watchdog.waiting(lambda: "optimizer state"):
            states = {parameter: self._gather_state_of(optimizer, parameter) for parameter in _parameters(optimizer)}
        return {parameter: state for parameter, state in states.items() if state}

    def _gather_state_of(self, optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
        held = optimizer.state.get(parameter, {}) if self.is_owned(parameter) else {}
        if isinstance(parameter, DistTensor):
            return held
        on_host = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in held.items()}
        # Every rank broadcasts for every parameter, in the same order, also for parameters without state.
        sent = self._comm.bcast(on_host, self._owners[parameter])
        # torch keeps the step count, which has no dimensions, on the CPU, and other tensors on the parameter's device.
        return held or {
            key: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in sent.items()
        }

    def fill_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Post-hook of ``state_dict``: insert the state of all parameters. Collective.

        Parameters
        ----------
        optimizer : Optimizer
            Optimizer of this split.
        state_dict : dict[str, object]
            Result of the optimizer's ``state_dict``, which is changed in place.

        Returns
        -------
        dict of str to object
        """
        states = self.gather_state(optimizer)
        numbers = {parameter: number for number, parameter in enumerate(_parameters(optimizer))}
        return {**state_dict, "state": {numbers[parameter]: {**entries} for parameter, entries in states.items()}}


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


def _exchange_buckets(comm: MPI.Intracomm, buckets: Sequence[Sequence[torch.Tensor]]) -> None:
    """Send each rank's bucket of updated parameters to all other ranks. Collective."""
    # All ranks have the same buckets, so each can compute the sizes of all messages. An owner may have fewer buckets
    # than the others; all tensors of a round have one dtype and device.
    like = next(bucket for bucket in buckets if bucket)[0]
    sizes = [[parameter.numel() for parameter in bucket] for bucket in buckets]
    flat = [like.new_empty(sum(each)) for each in sizes]
    if buckets[comm.rank]:
        # Into the buffer of the message, so that each value is copied once.
        torch.cat([parameter.detach().reshape(-1) for parameter in buckets[comm.rank]], out=flat[comm.rank])
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sends = [(rank, flat[comm.rank]) for rank in others if flat[comm.rank].numel()]
    receives = [(rank, flat[rank]) for rank in others if flat[rank].numel()]
    Exchange(comm, sends, receives, "updated weights").wait()
    for rank in others:
        for parameter, values in zip(buckets[rank], flat[rank].split(sizes[rank]), strict=True):
            parameter.copy_(values.view_as(parameter))
