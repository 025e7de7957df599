"""How the training steps of a measurement or a prediction run: their memory format, eager or captured."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_FORMATS = ("contiguous", "channels_last")


@dataclass(frozen=True)
class StepMode:
    """Memory format of images and weights, and eager or captured steps.

    Attributes
    ----------
    memory_format : str
        One of ``MEMORY_FORMATS``; ``"channels_last"`` applies to two and to three dimensions.
    captured : bool
        True for replays of :func:`distconv.capture`. Otherwise steps are eager.

    Examples
    --------
    >>> StepMode().name, StepMode("channels_last", captured=True).name
    ('contiguous, eager', 'channels_last, captured')
    """

    memory_format: str = MEMORY_FORMATS[0]
    captured: bool = False

    @property
    def name(self) -> str:
        """Name of the mode in messages and machine files."""
        return f"{self.memory_format}, {'captured' if self.captured else 'eager'}"


MODES = tuple(StepMode(name, captured) for captured in (False, True) for name in MEMORY_FORMATS)
"""All modes. The first one is the default."""
