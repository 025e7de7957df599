"""SparsePipe's heterogeneous setting: its GPUs, its network by roofline, and the partitions that it reports.

The paper prints neither layer times nor the bandwidth between its servers. Times here are a roofline's: they are what
Table I allows, not measurements. The partitions of Table III are of the sparse network; the dense one is the paper's
baseline, which its GPUs hold for 32 samples only. With these times and 1, 2, 3, 5, 7 or 10 Gb/s between the GPUs the
paper's algorithm gives the heterogeneous split of a row of Table III in 3 of 24 cases for the dense network and in none
of 24 for the sparse one (``distconv reproduce sparsepipe --gigabits 1 2 3 5 7 10``).

Source: Zhai et al. 2020 (SparsePipe), IV-A, IV-C, Tables I-III.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distconv.perfmodel.machine.machine import Roofline
from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from distconv.perfmodel.stages.devices import Device

GPUS = {
    "TitanV": Roofline(13.8e12, 653e9, 10e-6),
    "TitanXP": Roofline(12.1e12, 547e9, 10e-6),
    "RTX": Roofline(13.4e12, 352e9, 10e-6),
}
"""Table I: peak single precision and memory bandwidth; a kernel's fixed cost is ours."""


@dataclass(frozen=True)
class Row:
    """GPUs of a row of Table III, and the split that each of its two methods found: replicas and GPUs per stage."""

    counts: dict[str, int]
    homogeneous: str
    assignment: tuple[dict[str, int], ...]

    @property
    def heterogeneous(self) -> str:
        """Replicas of each stage of ``assignment``, as the paper writes them."""
        return "-".join(str(sum(held.values())) for held in self.assignment)


TABLE_III = (
    Row({"TitanV": 1, "RTX": 4}, "1-2-1-1", ({"RTX": 4}, {"TitanV": 1})),
    Row({"TitanV": 1, "TitanXP": 1, "RTX": 4}, "4-1-1", ({"RTX": 4}, {"TitanV": 1}, {"TitanXP": 1})),
    Row({"TitanV": 1, "TitanXP": 2, "RTX": 4}, "4-1-1-1", ({"RTX": 4, "TitanXP": 2}, {"TitanV": 1})),
    Row({"TitanV": 1, "TitanXP": 3, "RTX": 4}, "4-1-1-1-1", ({"RTX": 4, "TitanXP": 3}, {"TitanV": 1})),
)

BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
BATCH = 64
RESOLUTION = 50
CLASSES = 40

SURFACE_SITES = 0.076 * 32**3 / 32**2
"""Occupied voxels at resolution r are this times r^2, as of a surface: Table II at 32^3."""

MOST_SITES = 0.026 * 50**3
"""There are no more points than that: Table II at 50^3."""

SURFACE_NEIGHBOURS = 9
"""Of the 27 voxels around a voxel on a surface: a sheet of 3 x 3."""


@dataclass(frozen=True)
class Work:
    """One layer: operations and bytes moved forward, bytes of output and parameters; backward takes so many times."""

    name: str
    flops: float
    moved_bytes: float
    output_bytes: float
    parameter_bytes: float
    backward: float


def vgg16_bn(gpu: str, sparse: bool = True) -> Profile:
    """The 53 layers of VGG16-BN for 64 samples of 50^3 voxels on one of ``GPUS``, sparse or dense."""
    roofline = GPUS[gpu]
    layers = []
    for work in _works(sparse):
        forward = roofline.time(work.flops, work.moved_bytes, work.output_bytes / 4)
        layers.append(Layer(work.name, forward, work.backward * forward, work.output_bytes, work.parameter_bytes))
    return Profile(layers)


def devices(counts: dict[str, int], sparse: bool = True) -> list[Device]:
    """So many of ``GPUS``, with their roofline times and without a memory limit."""
    return [
        Device(name, count, [layer.time_s for layer in vgg16_bn(name, sparse).layers]) for name, count in counts.items()
    ]


def _works(sparse: bool) -> Iterator[Work]:
    resolution, channels = RESOLUTION, 1
    for block, widths in enumerate(BLOCKS, 1):
        sites = BATCH * _sites(resolution, sparse)
        for index, width in enumerate(widths, 1):
            yield _convolution(f"conv{block}_{index}", sites, channels, width, sparse)
            yield _pointwise(f"bn{block}_{index}", sites * width, 2 * width)
            yield _pointwise(f"relu{block}_{index}", sites * width)
            channels = width
        resolution //= 2
        yield _pointwise(f"pool{block}", BATCH * _sites(resolution, sparse) * channels)
    yield _pointwise("global_pool", BATCH * channels)
    yield _pointwise("flatten", BATCH * channels)
    for index, width in enumerate((4096, 4096, CLASSES), 1):
        yield _product(f"fc{index}", BATCH, channels, width)
        if width != CLASSES:
            yield _pointwise(f"relu_fc{index}", BATCH * width)
            yield _pointwise(f"dropout{index}", BATCH * width)
        channels = width


def _sites(resolution: int, sparse: bool) -> float:
    everywhere = float(resolution**3)
    return min(SURFACE_SITES * resolution**2, MOST_SITES, everywhere) if sparse else everywhere


def _convolution(name: str, sites: float, channels: int, width: int, sparse: bool) -> Work:
    """Of 3^3; a sparse one gathers each neighbour's features and scatters each product."""
    neighbours = SURFACE_NEIGHBOURS if sparse else 27
    weights = 4.0 * 27 * channels * width
    moved = 4 * sites * (channels + width) * (neighbours if sparse else 1)
    return Work(name, 2 * sites * neighbours * channels * width, moved + weights, 4 * sites * width, weights, 2.0)


def _product(name: str, rows: int, channels: int, width: int) -> Work:
    weights = 4.0 * (channels + 1) * width
    moved = 4 * rows * (channels + width) + weights
    return Work(name, 2.0 * rows * channels * width, moved, 4.0 * rows * width, weights, 2.0)


def _pointwise(name: str, elements: float, parameters: int = 0) -> Work:
    return Work(name, 0.0, 8 * elements, 4 * elements, 4.0 * parameters, 1.0)
