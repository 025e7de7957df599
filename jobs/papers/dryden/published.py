"""Mini-batch times that Dryden et al. 2019 measured on Lassen: their Tables I, II and III, to be predicted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedTime:
    """One mini-batch time: a cell of a table.

    The mini-batch has ``samples`` samples, and ``group`` GPUs compute each ``samples_per_group`` of them. Speed-ups are
    relative to the first column of the same row, which has ``base_group`` GPUs and the time ``base_s``.
    """

    table: str
    model: str
    samples: int
    samples_per_group: int
    group: int
    time_s: float
    base_group: int
    base_s: float

    @property
    def ranks(self) -> int:
        """Total number of GPUs."""
        return self.samples // self.samples_per_group * self.group

    @property
    def is_base(self) -> bool:
        """Return True if it is in the first column, whose speed-up is 1 by definition."""
        return self.group == self.base_group

    @property
    def speedup(self) -> float:
        """Speed-up, computed from the times, which have three digits. The paper's own ratios have two."""
        return self.base_s / self.time_s


@dataclass(frozen=True)
class Table:
    """One of the paper's tables: ``times_s`` by mini-batch size, a column for each of ``groups``.

    ``sample`` is (C, H, W). A row has fewer times than ``groups`` if the last ones would need more than 2048 GPUs.
    """

    name: str
    caption: str
    model: str
    sample: tuple[int, int, int]
    samples_per_group: int
    groups: tuple[int, ...]
    times_s: dict[int, tuple[float, ...]]

    @property
    def cells(self) -> tuple[PublishedTime, ...]:
        """Return all cells, row by row."""
        return tuple(
            PublishedTime(self.name, self.model, samples, self.samples_per_group, group, time, self.groups[0], times[0])
            for samples, times in self.times_s.items()
            for group, time in zip(self.groups, times, strict=False)
        )


TABLE_I = Table(
    "I",
    "1K mesh, speed-up over 1 GPU/sample",
    "mesh1k",
    (18, 1024, 1024),
    1,
    (1, 2, 4, 8, 16),
    {
        4: (0.403, 0.2, 0.121, 0.0906, 0.066),
        8: (0.399, 0.201, 0.124, 0.0829, 0.0681),
        16: (0.4, 0.201, 0.121, 0.085, 0.0739),
        32: (0.401, 0.207, 0.123, 0.0874, 0.0794),
        64: (0.407, 0.208, 0.124, 0.0911, 0.0839),
        128: (0.407, 0.209, 0.125, 0.0931, 0.0902),
        256: (0.401, 0.209, 0.127, 0.0977),
        512: (0.393, 0.209, 0.126),
        1024: (0.4, 0.211),
    },
)

TABLE_II = Table(
    "II",
    "2K mesh, speed-up over 2 GPUs/sample",
    "mesh2k",
    (18, 2048, 2048),
    1,
    (2, 4, 8, 16),
    {
        2: (0.247, 0.12, 0.0859, 0.0683),
        4: (0.249, 0.123, 0.0895, 0.0662),
        8: (0.25, 0.125, 0.0849, 0.0665),
        16: (0.249, 0.121, 0.0848, 0.0681),
        32: (0.251, 0.122, 0.0851, 0.0703),
        64: (0.252, 0.122, 0.0856, 0.0729),
        128: (0.252, 0.122, 0.0867, 0.0748),
        256: (0.25, 0.123, 0.089),
        512: (0.249, 0.123),
    },
)

TABLE_III = Table(
    "III",
    "ResNet-50, speed-up over 32 samples/GPU",
    "resnet50",
    (3, 224, 224),
    32,
    (1, 2, 4),
    {
        128: (0.106, 0.0734, 0.0593),
        256: (0.106, 0.0732, 0.0671),
        512: (0.105, 0.0776, 0.0617),
        1024: (0.105, 0.0747, 0.0672),
        2048: (0.108, 0.0733, 0.0651),
        4096: (0.0984, 0.078, 0.066),
        8192: (0.109, 0.0785, 0.0725),
        16384: (0.108, 0.0844, 0.0792),
        32768: (0.109, 0.0869),
    },
)

TABLES = (TABLE_I, TABLE_II, TABLE_III)


@dataclass(frozen=True)
class PrintedRatio:
    """A speed-up over one GPU that VI-A prints for FP and BP of a layer together at N=1.

    ``gpus`` is None if the text does not state the number of GPUs.
    """

    ratio: float
    gpus: int | None


CALIBRATION_ROWS = (4, 128)
"""Mini-batch sizes of Table I that constants may be fitted to; every other cell is held out."""


def calibrates(cell: PublishedTime) -> bool:
    """Return True if ``cell`` is one of those that constants are fitted to."""
    return cell.table == "I" and cell.samples in CALIBRATION_ROWS
