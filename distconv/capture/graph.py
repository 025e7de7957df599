"""Replays on a GPU: a recording as one CUDA graph.

A CUDA graph contains the addresses and the host's values with which it was captured. So arguments and gradients are
copied into memory of the graph before a replay, and results are copied out of it. Work of the host in each replay, such
as messages of MPI and functions that read values, is unsupported (:func:`unfit`). Tensors that Python made from numbers
are copied to the GPU before the capture (:func:`on_gpu`). :mod:`.captured` calls this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from distconv.capture.entries import (
    Call,
    Entry,
    Operator,
    Post,
    Recording,
    Ref,
    Slot,
    SlotOrigin,
    Sum,
    Together,
    makes,
    reads,
)
from distconv.capture.placement import below_autograd
from distconv.capture.program import Program
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


def unfit(recording: Recording) -> Iterator[str]:
    """Yield the reasons, each with its line, why a recording that uses a GPU cannot become a CUDA graph."""
    constants = _numbers(recording) | _places_of_generators(recording)
    inputs = {recording.slots[slot].storage for slot in recording.inputs if slot is not None}
    for entry in recording.entries:
        reason = _by_host(entry)
        if not reason and isinstance(entry, Operator):
            reason = _of_operator(recording, entry, constants, inputs)
        if reason:
            yield f"{entry.line}: on a GPU {reason}"


def _by_host(entry: Entry) -> str:
    if isinstance(entry, (Post, Sum)) and entry.channel is None and reads(entry):
        return (
            f"steps are replayed as one CUDA graph, in which there are no messages of MPI ({entry.what}): set "
            "DISTCONV_TRANSPORT=nccl, with a GPU for each rank, or leave the step as it is"
        )
    if isinstance(entry, Together) or (isinstance(entry, Call) and not entry.launches):
        return (
            "the host has no part in a replay, but here it looks at values or at the random generator (checkpointed "
            "blocks: preserve_rng_state=False)"
        )
    return ""


def _of_operator(recording: Recording, entry: Operator, constants: set[int], inputs: set[int]) -> str:
    slots = recording.slots
    if any(_on_host(slots[slot]) and slot not in constants for slot in reads(entry)):
        return "a tensor of the CPU is used: make it on the GPU"
    if any(_on_host(slots[slot]) and slot not in constants for slot in makes(entry)):
        return "a tensor goes to the CPU, or is computed there"
    devices = {slots[slot].geometry[-1] for slot in (*reads(entry), *makes(entry)) if not _on_host(slots[slot])}
    if devices - {recording.gpu}:
        return f"a graph is of one, {recording.gpu}; here are tensors on {', '.join(sorted(map(str, devices)))}"
    if any(slots[slot].storage in inputs for slot in entry.writes):
        return "the step writes to an argument, of which a graph has a copy: clone it"
    return ""


def _on_host(slot: Slot) -> bool:
    return bool(slot.geometry[-1].type == "cpu")


def _numbers(recording: Recording) -> set[int]:
    """Return the slots on the host that depend only on numbers of Python, and to which no operator writes."""
    slots = recording.slots
    operators = [entry for entry in recording.entries if isinstance(entry, Operator)]
    written = {slots[slot].storage for entry in operators for slot in entry.writes}
    fixed = {n for n, slot in enumerate(slots) if slot.kind is SlotOrigin.CONSTANT and _on_host(slot)}
    for entry in operators:
        if not entry.writes and not entry.draws and fixed.issuperset(reads(entry)):
            fixed.update(slot for slot in makes(entry) if _on_host(slots[slot]) and slots[slot].storage not in written)
    return fixed


def _places_of_generators(recording: Recording) -> set[int]:
    operators = (entry for entry in recording.entries if isinstance(entry, Operator) and entry.function in _ATTENTION)
    return {slot for entry in operators for slot in makes(entry) if _on_host(recording.slots[slot])}


def on_gpu(recording: Recording) -> Recording:
    """Return the recording with constants in place of tensors that the host computes; :func:`unfit` must be empty."""
    slots, entries = [*recording.slots], []
    values = {slot: slots[slot].value for slot in _numbers(recording)}

    def now(value: Any) -> Any:
        if isinstance(value, Ref):
            return values[value.slot]
        if isinstance(value, (list, tuple)):
            return type(value)(map(now, value))
        return value

    for entry in recording.entries:
        if not isinstance(entry, Operator) or not _of_host(recording, entry):
            entries.append(entry)
            continue
        with torch.no_grad(), below_autograd():
            result = entry.function(*now(entry.args), **{key: now(value) for key, value in entry.kwargs.items()})
        for slot, value in zip(makes(entry), [result] if entry.one else result, strict=True):
            if _on_host(slots[slot]):
                values[slot] = value
                slots[slot] = replace(slots[slot], kind=SlotOrigin.CONSTANT, value=value)
            else:  # cloned in each replay, since the step may write to it
                slots.append(Slot(SlotOrigin.CONSTANT, -1, slots[slot].geometry, value))
                entries.append(Operator(entry.line, _CLONE, (Ref(len(slots) - 1),), {}, [slot], True))
    return replace(recording, slots=slots, entries=entries)


def _of_host(recording: Recording, entry: Operator) -> bool:
    """Return True if ``entry`` computes on the host, or only copies from the host."""
    touched = [*reads(entry), *makes(entry)]
    sources = [*reads(entry)] or touched
    return bool(sources) and all(_on_host(recording.slots[slot]) for slot in sources)


class Graph:
    """A CUDA graph of the generated code.

    Parameters
    ----------
    program : Program
        The generated code.
    recording : Recording
        The recording from which it was generated, as :func:`on_gpu` returned it.
    given : tuple
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
        program: Program,
        recording: Recording,
        given: tuple[Sequence[Any], Sequence[torch.Tensor | None]],
        generators: Sequence[torch.Generator],
        pool: Any,
    ) -> None:
        device = recording.gpu
        assert device is not None
        self._blocks, self._gradients = ([*map(_like, each)] for each in given)
        self._graph = torch.cuda.CUDAGraph()
        for generator in generators:
            if generator.device.type == "cuda" and generator is not torch.cuda.default_generators[device.index]:
                self._graph.register_generator_state(generator)
        held = {slot.value.untyped_storage()._cdata for slot in recording.slots if slot.value is not None}
        # "thread_local", since other threads, such as the watchdog's, may call CUDA during the capture.
        graph = torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local")
        with torch.cuda.device(device), graph, torch.no_grad(), below_autograd():
            results = program.replay(self._blocks, self._gradients)
        self._results = [(each, each.untyped_storage()._cdata in held) for each in results]
        self._passing = [each for each, is_held in self._results if not is_held]
        """Results that the next replay overwrites."""
        messages = [entry for entry in recording.entries if isinstance(entry, (Post, Sum)) and entry.channel]
        self._channels: Sequence[Channel] = [*{id(entry.channel): entry.channel for entry in messages}.values()]
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
        _copy(self._blocks, blocks)
        _copy(self._gradients, gradients)
        self._graph.replay()
        _copy(gradients, self._gradients)
        news = [*map(_like, self._passing)]
        _copy(news, self._passing)
        for channel in self._channels:
            channel.launched([_Reached(torch.cuda.current_stream(channel.device))], "the replay of a step")
        memory = iter(news)
        return [each if is_held else next(memory) for each, is_held in self._results]


class _Reached:
    """A replay with the interface of a ``Work`` of torch's process groups. It completes on ``stream``."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = stream.record_event()

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.wait()


def _like(value: Any) -> Any:
    """Return an uninitialized tensor like ``value``; ``value`` itself if it is not a tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _copy(to: Sequence[Any], of: Sequence[Any]) -> None:
    pairs = [(a, b) for a, b in zip(to, of, strict=True) if isinstance(a, torch.Tensor)]
    pairs = [(_once(a), _once(b)) if 0 in a.stride() else (a, b) for a, b in pairs]
    if pairs:
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that contains each element of the memory once, without expanded dimensions."""
    shape = [min(n, 1) if step == 0 else n for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(shape, tensor.stride())
