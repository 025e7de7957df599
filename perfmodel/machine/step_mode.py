"""How the training steps of a measurement or a prediction run: their memory format, eager or captured."""

from __future__ import annotations

from dataclasses import dataclass

from distconv.memory_format import FORMATS


@dataclass(frozen=True)
class StepMode:
    """Memory format of images and weights, and eager or captured steps.

    Attributes
    ----------
    memory_format : str
        One of ``FORMATS``; ``"channels_last"`` applies to two and to three dimensions.
    captured : bool
        True for replays of :func:`distconv.capture`. Otherwise steps are eager.

    Examples
    --------
    >>> StepMode().name, StepMode("channels_last", captured=True).name
    ('contiguous, eager', 'channels_last, captured')
    >>> StepMode("channels_last", captured=True).options
    ' --captured --memory-format channels_last'
    """

    memory_format: str = FORMATS[0]
    captured: bool = False

    @property
    def name(self) -> str:
        """Name of the mode in messages and machine files."""
        return f"{self.memory_format}, {'captured' if self.captured else 'eager'}"

    @property
    def options(self) -> str:
        """Options of ``distconv profile`` and ``distconv plan`` that select the mode, each after a space."""
        memory_format = "" if self.memory_format == FORMATS[0] else f" --memory-format {self.memory_format}"
        return f"{' --captured' if self.captured else ''}{memory_format}"


MODES = tuple(StepMode(name, captured) for captured in (False, True) for name in FORMATS)
"""All modes. The first one is the default."""
