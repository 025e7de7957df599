"""SparsePipe's heterogeneous setting: its GPUs, its network by roofline or as measured, its partitions.

The paper prints neither layer times nor the bandwidth between its servers. Layer times are those of a roofline with the
rates of Table I, or those of a measured profile scaled to the total time in Table II. The partitions of Table III are
of the sparse network. The dense one is the paper's baseline, which its GPUs hold for 32 samples only. README.md in this
folder contains the results.

Source: Zhai et al. 2020 (SparsePipe), IV-A, IV-C, Tables I-III.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from distconv.perfmodel.machine.machine import Roofline
from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from distconv.perfmodel.profiles.predicted_profile import scale_profile
from distconv.perfmodel.stages.devices import Device

GPUS = {
    "TitanV": Roofline(13.8e12, 653e9, 10e-6),
    "TitanXP": Roofline(12.1e12, 547e9, 10e-6),
    "RTX": Roofline(13.4e12, 352e9, 10e-6),
}
"""Peak single-precision rate and memory bandwidth (Table I), and a fixed cost of a kernel, which is assumed."""


@dataclass(frozen=True)
class GpuRow:
    """Two rows of Table III, which have the same GPUs: the partition that each of the two methods found."""

    counts: dict[str, int]
    """Number of GPUs of each type."""
    homogeneous: str
    """Replicas of each stage by MP, which does not distinguish the types. ``4-1``: two stages, the first on 4 GPUs."""
    assignment: tuple[dict[str, int], ...]
    """GPUs of each stage by HETE-MP, number by type."""

    @property
    def heterogeneous(self) -> str:
        """Replicas of each stage of ``assignment``, as the paper writes them."""
        return "-".join(str(sum(held.values())) for held in self.assignment)


TABLE_III = (
    GpuRow({"TitanV": 1, "RTX": 4}, "1-2-1-1", ({"RTX": 4}, {"TitanV": 1})),
    GpuRow({"TitanV": 1, "TitanXP": 1, "RTX": 4}, "4-1-1", ({"RTX": 4}, {"TitanV": 1}, {"TitanXP": 1})),
    GpuRow({"TitanV": 1, "TitanXP": 2, "RTX": 4}, "4-1-1-1", ({"RTX": 4, "TitanXP": 2}, {"TitanV": 1})),
    GpuRow({"TitanV": 1, "TitanXP": 3, "RTX": 4}, "4-1-1-1-1", ({"RTX": 4, "TitanXP": 3}, {"TitanV": 1})),
)

BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Filters of the convolutions of VGG16-BN, in blocks that end with a pooling."""

BATCH = 64
"""Samples of a mini-batch in Figure 9."""

RESOLUTION = 50
"""Voxels along each side in Figure 9."""

CLASSES = 40
"""Classes of ModelNet40."""

SURFACE_SITES = 0.076 * 32**3 / 32**2
"""Number of occupied voxels at resolution r, divided by r^2.

Table II has 7.6 % of 32^3. The points lie on a surface, so their number grows with r^2 instead of r^3.
"""

MOST_SITES = 0.026 * 50**3
"""Upper bound of the number of occupied voxels, since the number of points is limited (Table II: 2.6 % of 50^3)."""

SURFACE_NEIGHBOURS = 9
"""Occupied voxels among the 27 of a 3^3 kernel: the sheet of 3 x 3 that a surface has there. This is an assumption."""

CUT = 24
"""The layer with which the second stage of HETE-MP's 7-1 begins (IV-C)."""

EPOCH_S = 129.63
"""Seconds of an epoch of the sparse network at 50^3 on one GPU (Table II)."""

CLOUDS = 9843
"""Training clouds of ModelNet40."""

MEASURED, MEASURED_BATCH = Path(__file__).with_name("vgg16_bn-50-batch16.json"), 16
"""Measured profile of the sparse network, and its number of samples.

It was measured with 16 embedded shapes of 4,096 points at 50^3, in one thread of a shared AMD EPYC virtual machine, by
``distconv profile --layers --model sparse_vgg16_bn --input 1,50,50,50 --batch 16 --classes 40
--warmup 1 --iterations 5``.
"""


@dataclass(frozen=True)
class ProfileSource:
    """Source of layer times. The profiles on different GPUs have the same layers and sizes, but other times."""

    name: str
    on: Callable[[str], Profile]
    """Returns the profile on a GPU, a key of ``GPUS``."""

    def with_larger_messages(self, factor: float) -> ProfileSource:
        """Return the source with messages between layers that are ``factor`` times as large.

        A sparse tensor may be sent with its coordinates, whose size the paper does not state.
        """
        if factor == 1.0:
            return self

        def on(gpu: str) -> Profile:
            profile = self.on(gpu)
            layers = [replace(layer, activation_bytes=factor * layer.activation_bytes) for layer in profile.layers]
            return Profile(layers, profile.edges)

        return ProfileSource(f"{self.name}, messages {factor:g} times as large", on)

    def devices(self, counts: dict[str, int]) -> list[Device]:
        """Return devices of ``GPUS`` with their times, without a memory limit."""
        return [Device(name, count, [layer.time_s for layer in self.on(name).layers]) for name, count in counts.items()]


def by_roofline(sparse: bool) -> ProfileSource:
    """Return the sparse or the dense network by the roofline of Table I."""
    kind = "sparse" if sparse else "dense"
    return ProfileSource(f"{kind} {RESOLUTION}^3, roofline of Table I", lambda gpu: vgg16_bn(gpu, sparse))


def as_measured(path: Path = MEASURED, batch: int = MEASURED_BATCH) -> list[ProfileSource]:
    """Return the sparse network of a measured profile, scaled to the total time in Table II on a Titan XP.

    Times are scaled from ``batch`` to the paper's mini-batch in proportion. This overestimates linear layers, whose
    weights are read once per mini-batch. One source scales times to other GPUs by their operations per second, the
    other by their bandwidth, both of Table I. A real layer lies between the two.

    Parameters
    ----------
    path : pathlib.Path
        Layer profile.
    batch : int
        Samples of the profile.

    Returns
    -------
    list of ProfileSource
        Scaled by operations, and scaled by bandwidth.

    Raises
    ------
    ProfileError
        If the file is not a valid profile.
    """
    profile = scale_profile(Profile.load(path), BATCH / batch)
    # Seconds of a mini-batch in Table II over those measured here: only the proportions of the layers are used.
    total = EPOCH_S * BATCH / CLOUDS / sum(layer.time_s for layer in profile.layers)

    def source(name: str, speed: Callable[[Roofline], float]) -> ProfileSource:
        return ProfileSource(
            f"sparse {RESOLUTION}^3, measured layers, GPUs by {name}",
            lambda gpu: _scale_times(profile, total * speed(GPUS["TitanXP"]) / speed(GPUS[gpu])),
        )

    return [source("operations", lambda gpu: gpu.flops_per_s), source("bandwidth", lambda gpu: gpu.bytes_per_s)]


def _scale_times(profile: Profile, factor: float) -> Profile:
    # Not scale_profile, which scales the messages too: another GPU has the same samples.
    layers = [
        replace(layer, forward_s=factor * layer.forward_s, backward_s=factor * layer.backward_s)
        for layer in profile.layers
    ]
    return Profile(layers, profile.edges)


@dataclass(frozen=True)
class LayerWork:
    """Work of one layer for a mini-batch. ``flops`` and ``moved_bytes`` are those of the forward pass."""

    name: str
    flops: float
    moved_bytes: float
    output_bytes: float
    parameter_bytes: float
    backward: float
    """Time of the backward pass relative to the forward pass: 2 with weights (dL/dx and dL/dw), otherwise 1."""


def vgg16_bn(gpu: str, sparse: bool = True) -> Profile:
    """Return the 53 layers of VGG16-BN for 64 samples of 50^3 voxels on one of ``GPUS``, sparse or dense.

    Parameters
    ----------
    gpu : str
        One of ``GPUS``.
    sparse : bool
        True for the sparse network.

    Returns
    -------
    Profile
    """
    roofline = GPUS[gpu]
    layers = []
    for work in _layer_works(sparse):
        forward = roofline.time(work.flops, work.moved_bytes, work.output_bytes / 4)
        layers.append(Layer(work.name, forward, work.backward * forward, work.output_bytes, work.parameter_bytes))
    return Profile(layers)


def _layer_works(sparse: bool) -> Iterator[LayerWork]:
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
        yield _linear(f"fc{index}", BATCH, channels, width)
        if width != CLASSES:
            yield _pointwise(f"relu_fc{index}", BATCH * width)
            yield _pointwise(f"dropout{index}", BATCH * width)
        channels = width


def _sites(resolution: int, sparse: bool) -> float:
    cells = float(resolution**3)
    return min(SURFACE_SITES * resolution**2, MOST_SITES, cells) if sparse else cells


def _convolution(name: str, sites: float, channels: int, width: int, sparse: bool) -> LayerWork:
    """Return the work of a 3^3 convolution; a sparse one gathers each neighbour and scatters each product."""
    # The factors 4 here and below are the bytes of a float32.
    neighbours = SURFACE_NEIGHBOURS if sparse else 27
    weights = 4.0 * 27 * channels * width
    moved = 4 * sites * (channels + width) * (neighbours if sparse else 1)
    return LayerWork(name, 2 * sites * neighbours * channels * width, moved + weights, 4 * sites * width, weights, 2.0)


def _linear(name: str, rows: int, channels: int, width: int) -> LayerWork:
    weights = 4.0 * (channels + 1) * width
    moved = 4 * rows * (channels + width) + weights
    return LayerWork(name, 2.0 * rows * channels * width, moved, 4.0 * rows * width, weights, 2.0)


def _pointwise(name: str, elements: float, parameters: int = 0) -> LayerWork:
    # It reads and writes each element once. Its arithmetic is hidden by this memory traffic.
    return LayerWork(name, 0.0, 8 * elements, 4 * elements, 4.0 * parameters, 1.0)
