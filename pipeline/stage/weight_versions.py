"""Versions of a stage's weights on one rank, and passes that run with one of them.

Saved activations never contain a weight. If autograd saves a weight, a note of it is stored instead, and the backward
pass reads the version that is bound at that time. So one graph serves the policies stash, predict and newest.

Source: Chen et al. 2018 (SpecTrain), Eq. 4, for the prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from distconv.pipeline.schedules.actions import ScheduleError


@dataclass(frozen=True)
class _WeightNote:
    """View of parameter ``index`` that autograd saved."""

    index: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int
    conjugate: bool
    negative: bool

    @staticmethod
    def from_view(view: torch.Tensor, index: int, weights: torch.Tensor) -> _WeightNote:
        """Return the note of a ``view`` of ``weights``, which are parameter ``index``.

        The view may be real if the parameter is complex.
        """
        offset = _start(view) - _start(weights)
        return _WeightNote(index, view.dtype, view.size(), view.stride(), offset, view.is_conj(), view.is_neg())

    def view(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the same view of the present ``weights``."""
        offset = (_start(weights) + self.offset_bytes) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=weights.device)
        view = empty.set_(weights.untyped_storage(), offset, self.size, self.stride)
        view = view.conj() if self.conjugate else view
        return torch._neg_view(view) if self.negative else view


def _start(tensor: torch.Tensor) -> int:
    """Return the offset of a tensor in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.itemsize


@dataclass(frozen=True)
class _SavedActivation:
    """Activation that autograd saved, and its version counter at that time."""

    tensor: torch.Tensor
    version: int


class WeightVersions:
    """Versions of one stage's weights. The parameters hold the newest version, counted from 0.

    The values of parameters are exchanged while a pass is bound to another version.

    Parameters
    ----------
    parameters : sequence of Tensor
        Leaves on this rank.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        self.newest = 0
        # By version: its stashed weights, and the micro-batch after whose last gradient they are dropped.
        self._copies: dict[int, list[torch.Tensor]] = {}
        self._last_use: dict[int, int | None] = {}
        # For predictions: the weights before the last update, and the predicted weights until the next bind.
        self._before: list[torch.Tensor] | None = None
        self._predicted: list[torch.Tensor] | None = None
        # Indices of the parameters by the address of their storage, by which saved tensors are recognized as weights.
        self._places: dict[int, int] = {}

    def check_separate(self) -> None:
        """Check that parameters do not share memory: a copy of one would not be a view of the other's copy.

        Raises
        ------
        ScheduleError
            If two of them do.
        """
        filled = [tensor for tensor in self.parameters if tensor.numel()]
        if len({tensor.untyped_storage().data_ptr() for tensor in filled}) < len(filled):
            raise ScheduleError(
                "weights that share memory cannot be kept in versions; give each its own, or use weights='newest'"
            )

    # -- actions of the schedule ------------------------------------------------------------------------------------

    def stash(self, version: int, microbatch: int | None) -> None:
        """Keep a copy of the newest weights, which are ``version``, until :meth:`release` of ``microbatch``.

        Parameters
        ----------
        version : int
            Number of the newest version.
        microbatch : int or None
            The last micro-batch that uses the copy.
        """
        self._copies[version] = self._snapshot()
        self._last_use[version] = microbatch

    def release(self, microbatch: int | None = None) -> None:
        """Drop the copies that are kept for ``microbatch`` (None: all)."""
        for version, last in list(self._last_use.items()):
            if microbatch is None or last == microbatch:
                del self._copies[version], self._last_use[version]

    def predict(self, version: int) -> None:
        """Extrapolate the last update to ``version`` for the next pass: W + s (W - W before), s updates ahead.

        For SGD with momentum this equals SpecTrain's W - s eta v. It needs no access to the optimizer.

        Source: Chen et al. 2018 (SpecTrain), Eq. 4.
        """
        ahead = version - self.newest
        # Before the first update there is nothing to extrapolate: the prediction is the newest version.
        before = self._before or [tensor.detach() for tensor in self.parameters]
        with torch.no_grad():
            self._predicted = [
                torch.add(new, new - old, alpha=ahead) for new, old in zip(self.parameters, before, strict=True)
            ]

    def prepare_update(self, predicts: bool) -> None:
        """Prepare for an update of the parameters, which makes the next version."""
        self._before = self._snapshot() if predicts else None
        self.newest += 1

    def _snapshot(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in self.parameters]

    # -- passes -----------------------------------------------------------------------------------------------------

    @contextmanager
    def bind(self, version: int | None) -> Iterator[None]:
        """Bind the parameters to ``version`` (or to the predicted weights) inside the block.

        Backward passes inside the block read this version as well.
        """
        values, self._predicted = self._predicted, None
        if values is None and version is not None and version != self.newest:
            values = self._copies[version]
        newest = [tensor.data for tensor in self.parameters]
        try:
            if values is not None:
                # The parameters remain the same objects, which the modules and the optimizer hold.
                for tensor, value in zip(self.parameters, values, strict=True):
                    tensor.data = value
            yield
        finally:
            if values is not None:
                for tensor, value in zip(self.parameters, newest, strict=True):
                    tensor.data = value

    @contextmanager
    def save_notes(self) -> Iterator[None]:
        """Save notes instead of weights in forward passes inside the block."""
        # In each pass, because bind() exchanges the storages of the parameters.
        self._places = {tensor.untyped_storage().data_ptr(): i for i, tensor in enumerate(self.parameters)}
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> _WeightNote | _SavedActivation:
        index = self._places.get(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else None
        if index is None or not tensor.numel():
            # Not the tensor itself: an output that its own node saves would form a reference cycle and never be freed.
            return _SavedActivation(tensor.detach(), tensor._version)
        return _WeightNote.from_view(tensor, index, self.parameters[index])

    def _unpack(self, saved: _WeightNote | _SavedActivation) -> torch.Tensor:
        if isinstance(saved, _WeightNote):
            return saved.view(self.parameters[saved.index].detach())
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                f"an activation of shape {tuple(saved.tensor.shape)} that the backward pass needs was modified in "
                "place; use the out-of-place operation"
            )
        return saved.tensor
