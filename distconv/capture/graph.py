"""Replays on a GPU: a recording as one CUDA graph.

A CUDA graph contains the addresses and the host's values with which it was captured. So arguments and gradients are
copied into memory of the graph before a replay, and results are copied out of it. Work of the host in each replay, such
as messages of MPI and functions that read values, is unsupported (:func:`find_unsupported`). Tensors that Python made
from numbers are copied to the GPU before the capture (:func:`fold_host_constants`). :mod:`.captured` calls this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from distconv.capture.buffer_plan import below_autograd
from distconv.capture.operations import (
    AllReduce,
    FunctionCall,
    Op,
    OperatorCall,
    Recording,
    Ref,
    SendReceive,
    Slot,
    SlotOrigin,
    TryOnAllRanks,
    slots_made,
    slots_read,
)
from distconv.capture.replay_code import ReplayCode
from distconv.communication.gpu.nccl import Channel

_aten = torch.ops.aten
_CLONE = _aten.clone.default
_ATTENTION = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
"""Operators that return the state of the random generator for their backward.

Eagerly the state is on the host; while a graph is captured it is on the GPU.
"""


def find_unsupported(recording: Recording) -> Iterator[str]:
    """Yield the reasons, each with its line, why a recording that uses a GPU cannot become a CUDA graph."""
    attention = (op for op in recording.operations if isinstance(op, OperatorCall) and op.function in _ATTENTION)
    states = {slot for op in attention for slot in slots_made(op) if _is_on_host(recording.slots[slot])}
    constants = _python_number_slots(recording) | states
    inputs = {recording.slots[slot].storage for slot in recording.inputs if slot is not None}
    for op in recording.operations:
        reason = _host_work_reason(op)
        if not reason and isinstance(op, OperatorCall):
            reason = _operator_reason(recording, op, constants, inputs)
        if reason:
            yield f"{op.line}: on a GPU {reason}"


def _host_work_reason(op: Op) -> str:
    if isinstance(op, (SendReceive, AllReduce)) and op.channel is None and slots_read(op):
        return (
            f"the step is replayed as one CUDA graph, which cannot contain MPI messages ({op.what}). Set "
            "DISTCONV_TRANSPORT=nccl, with a GPU for each rank, or do not capture the step"
        )
    if isinstance(op, TryOnAllRanks) or (isinstance(op, FunctionCall) and not op.launches):
        return (
            "the host does nothing in a replay, but this line reads values or the state of a random generator. Move "
            "it out of the step (in checkpointed blocks, pass preserve_rng_state=False)"
        )
    return ""


def _operator_reason(recording: Recording, op: OperatorCall, constants: set[int], inputs: set[int]) -> str:
    slots = recording.slots
    if any(_is_on_host(slots[slot]) and slot not in constants for slot in slots_read(op)):
        return "a CPU tensor is used. Create it on the GPU"
    if any(_is_on_host(slots[slot]) and slot not in constants for slot in slots_made(op)):
        return "a tensor is copied to the CPU or computed there. Keep it on the GPU"
    # All devices but the host, of which only constants are left here.
    devices = {slots[slot].geometry[-1] for slot in (*slots_read(op), *slots_made(op)) if not _is_on_host(slots[slot])}
    if devices - {recording.gpu}:
        names = ", ".join(sorted(map(str, devices)))
        return (
            f"a CUDA graph has one device ({recording.gpu}), but the step has tensors on {names}. Use one GPU per rank"
        )
    if any(slots[slot].storage in inputs for slot in op.writes):
        return "the step changes an argument in place, of which a CUDA graph has only a copy. Clone it first"
    return ""


def _is_on_host(slot: Slot) -> bool:
    return bool(slot.geometry[-1].type == "cpu")


def _python_number_slots(recording: Recording) -> set[int]:
    """Return the slots on the host that depend only on numbers of Python, and to which no operator writes."""
    slots = recording.slots
    operators = [op for op in recording.operations if isinstance(op, OperatorCall)]
    written = {slots[slot].storage for op in operators for slot in op.writes}
    fixed = {n for n, slot in enumerate(slots) if slot.origin is SlotOrigin.CONSTANT and _is_on_host(slot)}
    for op in operators:
        if not op.writes and not op.draws and fixed.issuperset(slots_read(op)):
            # Memory that the step writes to is no constant, even if its first values are.
            fixed.update(
                slot for slot in slots_made(op) if _is_on_host(slots[slot]) and slots[slot].storage not in written
            )
    return fixed


def fold_host_constants(recording: Recording) -> Recording:
    """Return the recording with constants in place of tensors that the host computes.

    Call it only if :func:`find_unsupported` yields nothing.
    """
    slots, operations = [*recording.slots], []
    values = {slot: slots[slot].tensor for slot in _python_number_slots(recording)}

    def resolve(value: Any) -> Any:
        if isinstance(value, Ref):
            return values[value.slot]
        if isinstance(value, (list, tuple)):
            return type(value)(map(resolve, value))
        return value

    for op in recording.operations:
        # An operator computes on the host, or copies from it, if all that it reads is there (or makes, if it reads
        # none).
        sources = slots_read(op) or slots_made(op)
        on_host = bool(sources) and all(_is_on_host(recording.slots[slot]) for slot in sources)
        if not isinstance(op, OperatorCall) or not on_host:
            operations.append(op)
            continue
        with torch.no_grad(), below_autograd():
            result = op.function(*resolve(op.args), **{key: resolve(value) for key, value in op.kwargs.items()})
        for slot, value in zip(slots_made(op), [result] if op.returns_one else result, strict=True):
            if _is_on_host(slots[slot]):
                values[slot] = value
                slots[slot] = replace(slots[slot], origin=SlotOrigin.CONSTANT, tensor=value)
            else:  # cloned in each replay, since the step may write to it
                slots.append(Slot(SlotOrigin.CONSTANT, -1, slots[slot].geometry, value))
                operations.append(OperatorCall(op.line, _CLONE, (Ref(len(slots) - 1),), {}, [slot], True))
    return replace(recording, slots=slots, operations=operations)


class CudaGraphReplay:
    """A CUDA graph of the generated code.

    Parameters
    ----------
    program : ReplayCode
        The generated code.
    recording : Recording
        The recording from which it was generated, as :func:`fold_host_constants` returned it.
    example : tuple
        Blocks of the arguments, and gradients, like those of later replays in shapes, strides and dtypes.
    generators : sequence of torch.Generator
        Random generators that the step uses.
    pool : object
        The memory pool, as ``torch.cuda.graph_pool_handle`` returns it.

    Raises
    ------
    RuntimeError
        With CUDA's message, if the graph cannot be captured.
    """

    def __init__(
        self,
        program: ReplayCode,
        recording: Recording,
        example: tuple[Sequence[Any], Sequence[torch.Tensor | None]],
        generators: Sequence[torch.Generator],
        pool: Any,
    ) -> None:
        device = recording.gpu
        assert device is not None
        self._blocks, self._gradients = ([*map(_empty_like, each)] for each in example)
        self._graph = torch.cuda.CUDAGraph()
        for generator in generators:
            if generator.device.type == "cuda" and generator is not torch.cuda.default_generators[device.index]:
                self._graph.register_generator_state(generator)
        # Results that are tensors of the recording itself, such as a parameter, are returned without a copy.
        held = {slot.tensor.untyped_storage()._cdata for slot in recording.slots if slot.tensor is not None}
        # "thread_local", since other threads, such as the watchdog's, may call CUDA during the capture.
        graph = torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local")
        with torch.cuda.device(device), graph, torch.no_grad(), below_autograd():
            results = program.replay(self._blocks, self._gradients)
        self._results = [(each, each.untyped_storage()._cdata in held) for each in results]
        self._overwritten = [each for each, is_held in self._results if not is_held]
        """Results that the next replay overwrites."""
        messages = [op for op in recording.operations if isinstance(op, (SendReceive, AllReduce)) and op.channel]
        self._channels: Sequence[Channel] = [*{id(op.channel): op.channel for op in messages}.values()]
        for channel in self._channels:
            channel.graphs.add(self._graph)

    def replay(self, blocks: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Replay the graph.

        Parameters
        ----------
        blocks : sequence
            Blocks of the arguments.
        gradients : sequence of (Tensor or None)
            Gradients before the step, which are changed in place.

        Returns
        -------
        list of Tensor
            The outputs of the generated code, in new memory unless they existed before the step.
        """
        # A graph reads and writes the addresses of the capture, and the tensors of this call are others.
        _copy_tensors(self._blocks, blocks)
        _copy_tensors(self._gradients, gradients)
        self._graph.replay()
        # Gradients are accumulated in the graph's memory, and belong in the tensors of this call.
        _copy_tensors(gradients, self._gradients)
        # New memory in each replay: the caller may keep the results of earlier ones.
        copies = [*map(_empty_like, self._overwritten)]
        _copy_tensors(copies, self._overwritten)
        for channel in self._channels:
            channel.register_launch([_ReplayWork(torch.cuda.current_stream(channel.device))], "the replay of a step")
        memory = iter(copies)
        return [each if is_held else next(memory) for each, is_held in self._results]


class _ReplayWork:
    """A replay with the interface of a ``Work`` of torch's process groups. It completes on ``stream``."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = stream.record_event()

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.wait()


def _empty_like(value: Any) -> Any:
    """Return an uninitialized tensor like ``value``; ``value`` itself if it is not a tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _copy_tensors(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    pairs = [(a, b) for a, b in zip(targets, sources, strict=True) if isinstance(a, torch.Tensor)]
    # torch rejects copies into memory that several indices share.
    pairs = [(_without_expanded_dims(a), _without_expanded_dims(b)) if 0 in a.stride() else (a, b) for a, b in pairs]
    if pairs:
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


def _without_expanded_dims(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that contains each element of the memory once, without expanded dimensions."""
    shape = [min(n, 1) if step == 0 else n for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(shape, tensor.stride())
