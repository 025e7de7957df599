"""Comparison of a replay with the eager step, bit for bit.

:mod:`.captured` takes a :class:`StepSnapshot`, runs the eager step, restores the snapshot and replays. It then compares
the :class:`StepOutcome` of both. The comparison is local to a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from distconv.capture.gradients import SavedGradients, get_gradient
from distconv.capture.guards import block_of
from distconv.capture.operations import AllReduce, OperatorCall, SendReceive, SlotOrigin, strides_in_use
from distconv.capture.run import CaptureRun
from distconv.communication import gradient_reduction
from distconv.communication.digest import to_bytes

_TOLERANCE_FACTOR = 8
"""Bound on the difference between replay and step, as a multiple of the difference between two runs of the step.

It applies where kernels add in no fixed order.
"""


class StepSnapshot:
    """A copy of the state that a step may change: memory, gradients and random generators.

    Parameters
    ----------
    run : CaptureRun
        A recorded run of the step.
    blocks : sequence
        Blocks of the arguments.
    """

    def __init__(self, run: CaptureRun, blocks: Sequence[Any]) -> None:
        # By address: tensors that share memory are copied once.
        self._storages = {
            s.data_ptr(): (s, s.clone()) for s in (t.untyped_storage() for t in written_tensors(run, blocks))
        }
        self._gradients = SavedGradients()
        for leaf in run.leaves(blocks):
            self._gradients.add(leaf)
        generators = {id(g): g for g in (*run.generators, torch.default_generator)}
        self._generators = [(generator, generator.get_state()) for generator in generators.values()]

    def restore(self) -> None:
        """Restore the state. It may be called several times."""
        self._gradients.restore()
        for storage, values in self._storages.values():
            storage.copy_(values)
        for generator, state in self._generators:
            generator.set_state(state)


def written_tensors(run: CaptureRun, blocks: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors that existed before the step and to which it writes.

    Parameters
    ----------
    run : CaptureRun
        A recorded run of the step.
    blocks : sequence
        Blocks of the arguments of the next replay, which replace those of the recorded run.

    Returns
    -------
    list of Tensor
        Parameters, buffers, gradients, kept contributions and arguments.
    """
    slots, gradients = run.recording.slots, run.gradient_slots()
    now = [*map(get_gradient, run.leaves(blocks)), *(grad for _, grad, _ in gradient_reduction.unsynced_grads())]
    storages = {slots[slot].storage for slot in _written_slots(run)}
    tensors: list[torch.Tensor | None] = []
    for number, slot in enumerate(slots):
        if slot.storage in storages and slot.origin is SlotOrigin.EXISTING:
            tensors.append(now[gradients[number]] if number in gradients else slot.tensor)
    for index, input_slot in enumerate(run.recording.inputs):
        if input_slot is not None and slots[input_slot].storage in storages:
            tensors.append(blocks[index])
    return [tensor for tensor in tensors if tensor is not None]


def _written_slots(run: CaptureRun) -> Iterable[int]:
    for op in run.recording.all_operations():
        if isinstance(op, OperatorCall):
            yield from op.writes
        elif isinstance(op, SendReceive):
            yield from (slot for _, slot in op.receives)
        elif isinstance(op, AllReduce):
            yield op.slot


class StepOutcome:
    """Copies of the results and side effects of a step, with names.

    Parameters
    ----------
    run, blocks
        As in :class:`StepSnapshot`.
    result : object
        Tree of the results of the step.
    """

    def __init__(self, run: CaptureRun, blocks: Sequence[Any], result: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        values: list[tuple[str, torch.Tensor | None]] = []
        values += [(f"result {n}", block_of(tensor)) for n, tensor in enumerate(tensors)]
        values += [(f"the gradient of {_name(leaf)}", get_gradient(leaf)) for leaf in run.leaves(blocks)]
        values += [(f"a buffer or parameter, {_name(tensor)}", tensor) for tensor in written_tensors(run, blocks)]
        values += [
            (f"a gradient kept for {_name(leaf)}", grad) for leaf, grad, _ in gradient_reduction.unsynced_grads()
        ]
        generators = (*run.generators, torch.default_generator)
        values += [("the state of a random generator", generator.get_state()) for generator in generators]
        self.values = [(name, None if t is None else t.detach().clone()) for name, t in values]

    def first_difference(self, other: StepOutcome) -> str:
        """Return the name of the first tensor that differs in any bit; "" if none does."""
        if [name for name, _ in self.values] != [name for name, _ in other.values]:
            return "the number of tensors that it leaves"
        for (name, value), (_, expected) in zip(self.values, other.values, strict=True):
            if (value is None) != (expected is None) or (
                value is not None and expected is not None and not _has_equal_bits(value, expected)
            ):
                return name
        return ""

    def first_significant_difference(self, other: StepOutcome, again: StepOutcome) -> str:
        """Return the first tensor whose difference the order of sums does not explain, or "" if no tensor differs so.

        Such a difference exceeds both half of the digits of the tensor's largest value, and ``_TOLERANCE_FACTOR`` times
        the difference between two runs of the step.

        Parameters
        ----------
        other, again : StepOutcome
            Outcomes of two runs of the eager step.

        Returns
        -------
        str
        """
        for (name, value), (_, expected), (_, second) in zip(self.values, other.values, again.values, strict=True):
            if value is None or expected is None or second is None:
                if value is not expected:
                    return name
            elif not _is_near(value, expected, second):
                return name
        return ""


def _is_near(one: torch.Tensor, other: torch.Tensor, again: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype) or not one.is_floating_point():
        return _has_equal_bits(one, other)
    if not one.numel():
        return True
    # Two eager steps may agree by chance. So equality in half of the digits is enough in any case.
    deviation = (again - other).abs().max()
    bound = torch.maximum(torch.finfo(one.dtype).eps ** 0.5 * other.abs().max(), _TOLERANCE_FACTOR * deviation)
    return bool(((one - other).abs() <= bound).all())


def _has_equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    value, expected = ((t.shape, t.dtype, strides_in_use(t.shape, t.stride())) for t in (one, other))
    # Bytes, not ==: a NaN equals the same NaN, and 0 differs from -0.
    return value == expected and to_bytes(one).tobytes() == to_bytes(other).tobytes()


def _name(tensor: torch.Tensor) -> str:
    return gradient_reduction.parameter_name(tensor) or f"a tensor of shape {tuple(tensor.shape)}"
