"""Recipe of a mesh-tangling data set: channels, parameters, summary.

It does not import the solver, so that readers of a data set need not have numba.
"""

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
"""Version of the file format, which covers the layout and the selection of snapshots."""

TAU = 0.3
"""Default time horizon of the labels, in units of the solver.

It is about radius over speed of the flows' vortices, 0.15 to 0.35. During tau a signal travels tau (|u| + c), about 50
cells. Much of the information that determines a cell's label therefore lies in other cells.
"""


@dataclass(frozen=True)
class MeshRecipe:
    """All parameters that determine the content of a file.

    Parameters
    ----------
    size : int
        Number of cells along each side.
    samples, heldout : int
        Numbers of training and held-out samples.
    tau : float
        Time horizon of the labels.
    threshold : float
        Scaled corner Jacobian below which a cell is labelled.
    seed : int
        Seed of the data set.
    version : int
        Version of the file format.

    Raises
    ------
    DataError
        If a value is out of range.
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
            raise DataError(f"--size {self.size}: a mesh needs at least 16 cells along each side")
        if self.samples < 1 or self.heldout < 0:
            raise DataError(
                f"--samples {self.samples} --heldout {self.heldout}: at least 1 training sample is required, and "
                "neither may be negative"
            )
        if not self.tau > 0.0:
            raise DataError(f"--tau {self.tau}: must be positive")
        if not 0.0 < self.threshold < 1.0:
            raise DataError(f"--threshold {self.threshold}: must lie between 0 and 1")
        if self.seed < 0:
            raise DataError(f"--seed {self.seed}: must not be negative")

    def of_a_run(self) -> dict[str, float]:
        """Return the parameters that determine a single run: all but the numbers of samples."""
        return {key: value for key, value in asdict(self).items() if key not in ("samples", "heldout")}


@dataclass(frozen=True)
class Summary:
    """Summary of a generated file. Rates and fractions are between 0 and 1."""

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
