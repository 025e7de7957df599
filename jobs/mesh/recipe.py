"""What a mesh-tangling data set is made of: its channels, the recipe that its content follows from, its summary."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from distconv.errors import DataError

CHANNELS = (
    "log density",
    "log pressure",
    "specific energy",
    "sound speed",
    "gamma",
    "velocity u",
    "velocity v",
    "divergence",
    "vorticity",
    "strain rate",
    "viscous heating",
    "log V/V0",
    "minimum Jacobian",
    "maximum Jacobian",
    "log aspect ratio",
    "log edge ratio",
    "skew",
    "taper",
)

VERSION = 2
"""Of the files: their layout, and which snapshots of a run they hold."""

TAU = 0.3
"""Time that labels look ahead, unless asked otherwise: about radius over speed, 0.15 to 0.35, of the flows' vortices.

A signal crosses tau (|u| + c), some 50 cells, so that much of what decides about a cell is not in the cell yet.
"""


@dataclass(frozen=True)
class MeshRecipe:
    """Everything that the content of a file depends on.

    Raises
    ------
    DataError
        If a figure cannot be.
    """

    size: int
    samples: int
    heldout: int
    tau: float
    threshold: float
    seed: int
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.size < 16:
            raise DataError(f"size {self.size}: a mesh needs at least 16 cells along each side")
        if self.samples < 1 or self.heldout < 0:
            raise DataError(f"{self.samples} samples and {self.heldout} held out: at least 1 and 0 are needed")
        if not self.tau > 0.0:
            raise DataError(f"tau {self.tau}: the time that a label looks ahead must be positive")
        if not 0.0 < self.threshold < 1.0:
            raise DataError(f"threshold {self.threshold}: a scaled Jacobian to fall below lies between 0 and 1")
        if self.seed < 0:
            raise DataError(f"seed {self.seed}: a seed is not negative")

    def of_a_run(self) -> dict[str, float]:
        """What a single run depends on: runs of one recipe serve another that wants more samples."""
        return {key: value for key, value in asdict(self).items() if key not in ("samples", "heldout")}


@dataclass(frozen=True)
class Summary:
    """What a generated file holds. Rates and fractions are shares of 1."""

    path: str
    size: int
    samples: int
    heldout: int
    runs: int
    candidates: int
    rejection_rate: float
    rejected: dict[str, int]
    inversions: int
    positive_fraction: float
    positive_fraction_train: float
    positive_fraction_heldout: float
    steps: int
    seconds: float = 0.0

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.rejected.items())
        return (
            f"{self.path}: {self.samples} training and {self.heldout} held-out samples "
            f"of {self.size} x {self.size} cells from {self.runs} runs ({self.steps} steps, {self.seconds:.1f} s)\n"
            f"labelled: {100 * self.positive_fraction_train:.1f} % of the training cells, "
            f"{100 * self.positive_fraction_heldout:.1f} % of the held-out cells; "
            f"cells that invert within tau: {self.inversions}\n"
            f"rejected: {100 * self.rejection_rate:.0f} % of {self.candidates} candidate snapshots ({reasons})"
        )
