"""Buffers of modules that a forward pass changes, such as running statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from distconv.errors import PipelineError
from distconv.pipeline.stage.resharding import local_block


class BufferSnapshot:
    """Snapshot of the buffers of some modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        owners = dict.fromkeys(owner for module in modules for owner in module.modules())
        buffers = ((owner, name, buffer) for owner in owners for name, buffer in owner._buffers.items())
        # Copies, since the first forward pass changes buffers in place.
        self._values = [(owner, name, buffer.clone()) for owner, name, buffer in buffers if buffer is not None]

    @contextmanager
    def rerun(self) -> Iterator[None]:
        """Run a forward pass inside the block with the stored values, and drop the values that it writes."""
        now = [owner._buffers[name] for owner, name, _ in self._values]
        for owner, name, value in self._values:
            # The repeated pass changes the copies, so statistics are updated once.
            owner._buffers[name] = value
        try:
            yield
        finally:
            for (owner, name, _), buffer in zip(self._values, now, strict=True):
                owner._buffers[name] = buffer


@contextmanager
def check_unchanged(module: nn.Module) -> Iterator[None]:
    """Check that no buffer of a module changes inside the block. Replicas see other samples and would diverge.

    Raises
    ------
    PipelineError
        If one changes.
    """
    before = _buffer_versions(module)
    yield
    changed = [name for name, mark in _buffer_versions(module).items() if before.get(name) != mark]
    if changed:
        raise PipelineError(
            f"{type(module).__name__}: the forward pass changes the buffer {changed[0]!r}; replicas of the stage would "
            "differ in it (only the statistics of batch norm are synchronized); give the stage one replica"
        )


def _buffer_versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    # A buffer may be replaced as well as changed in place.
    return {name: (id(buffer), local_block(buffer)._version) for name, buffer in module.named_buffers()}
