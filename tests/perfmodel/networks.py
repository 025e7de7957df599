"""Small random networks with branches, joins and skips, and a machine on which distributions differ."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F

from distconv.perfmodel.machine.links import Link
from distconv.perfmodel.machine.machine import Compute, Machine, Overlap, Roofline


class RandomNetwork(torch.nn.Module):
    """Convolutions that each read the sum or the concatenation of one or two earlier results of equal extents."""

    def __init__(self, seed: int, layers: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.channels = draw.choice([4, 8, 16])
        self.reads: list[tuple[int, ...]] = []
        self.cats: list[bool] = []
        self.convolutions = torch.nn.ModuleList()
        self.norm = draw.random() < 0.5
        for index in range(layers):
            earlier = list(range(index + 1))
            count = min(len(earlier), draw.choice([1, 1, 2]))
            reads = tuple(sorted(draw.sample(earlier[-3:], min(count, len(earlier[-3:]))), reverse=draw.random() < 0.5))
            cat = len(reads) > 1 and draw.random() < 0.5
            kernel = draw.choice([1, 3, 3, 5])
            inputs = self.channels * (len(reads) if cat else 1)
            self.reads.append(reads)
            self.cats.append(cat)
            self.convolutions.append(torch.nn.Conv2d(inputs, self.channels, kernel, padding=kernel // 2))
        self.stem = torch.nn.BatchNorm2d(self.channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = [x]
        for reads, cat, convolution in zip(self.reads, self.cats, self.convolutions, strict=True):
            read = [results[i] for i in reads]
            merged = read[0] if len(read) == 1 else torch.cat(read, 1) if cat else read[0] + read[1]
            y = convolution(merged)
            results.append(F.relu(self.stem(y) if self.norm else y))
        return results[-1]


def machine(*, overlap: bool = True, per_node: int = 2, latency_s: float = 2e-6, bandwidth: float = 2e9) -> Machine:
    """Ranks that are slow enough for shuffles, halos and allreduces to matter to the networks here."""
    return Machine(
        name="small",
        ranks_per_node=per_node,
        memory_bytes=1e9,
        node=Link(latency_s, bandwidth),
        network=Link(4 * latency_s, bandwidth / 4),
        overlap=Overlap(overlap, overlap),
        compute=(Compute(1, Roofline(2e10, 4e9, 1e-6)),),
    )


FLOPS, KERNEL = 1e9, 1e-5


def plain(*, halo: bool = False, allreduce: bool = False, ranks_per_node: int = 4) -> Machine:
    """Memory costs nothing here: what is left are FLOPs, kernels and messages."""
    compute = Compute(1, Roofline(FLOPS, 1e30, KERNEL))
    near, far = Link(1e-4, 1e6), Link(3e-4, 1e5)
    return Machine(
        name="plain",
        ranks_per_node=ranks_per_node,
        memory_bytes=1e9,
        node=near,
        network=far,
        overlap=Overlap(halo, allreduce),
        compute=(compute,),
    )
