"""Figure 10: FLOP of each step of a scan over the layers of a pruned VGG-11, and of each operator of BP.

The scan is computed in float32 for one sample, and the FLOP of its products are recorded. With data, the network is
trained, pruned, and trained again while the pruned weights stay zero, and the sample is a test image. Without data, the
smallest initial weights of each layer are pruned. Training changes which weights are pruned, but not their number.

Source: BPPSA, 4.3, 5.3 and figure 10; See, Luong and Manning 2016 for pruning by magnitude, the same in each layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast

import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

from distconv.jobs.images.samples import ImageSamples
from distconv.jobs.papers.printed_tables import Rows
from distconv.kernels.jacobian import Pattern, SparseJacobian, Windows, batched_conv2d
from distconv.kernels.jacobian.windows import Two
from distconv.kernels.scan import Step, backpropagate, critical_path, recorded, sweep_levels
from distconv.layers.models.vgg import vgg11
from distconv.layers.scan import transposed_jacobian

from .training import MOMENTUM, Batch, batches

RATE = 0.01
"""Learning rate of SGD with momentum, before and after pruning. It is not from the paper."""

DEPTH = 2
"""Levels of the up-sweep (5.3). The paper calls them L0 to L2, where L0 is the input.

The down-sweep after the linear part has as many levels.
"""


@dataclass(frozen=True)
class PrunedVggRecipe:
    """Training of the network on the images in ``data``: ``iterations`` before pruning, and as many after it."""

    data: Path
    iterations: int
    batch: int
    rate: float


def prune(model: nn.Module, share: float) -> dict[torch.Tensor, torch.Tensor]:
    """Set the smallest weights of each convolution and linear layer to zero.

    Parameters
    ----------
    model : torch.nn.Module
    share : float
        Fraction of the weights.

    Returns
    -------
    dict of torch.Tensor to torch.Tensor
        Indices of the pruned weights in the flattened parameter, for each parameter.
    """
    pruned = {}
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            weight = layer.weight.detach()  # shares the parameter's memory, so the assignment below changes the layer
            smallest = weight.abs().flatten().argsort()[: round(share * weight.numel())]
            weight.view(-1)[smallest] = 0
            pruned[layer.weight] = smallest
    return pruned


def retrained(recipe: PrunedVggRecipe, share: float, width: int) -> tuple[nn.Sequential, torch.Tensor]:
    """Train VGG-11, prune it, and train it again.

    Parameters
    ----------
    recipe : PrunedVggRecipe
    share : float
        Pruned fraction of the weights.
    width : int
        Channels of the first layer.

    Returns
    -------
    (torch.nn.Sequential, torch.Tensor)
        The features of the network, and a test image (1, C, H, W).
    """
    with closing(ImageSamples(recipe.data, MPI.COMM_SELF)) as samples:
        model = vgg11(width, samples.extents[0], samples.classes)
        group = "test" if "test" in samples.groups else "train"
        full_batches = len(samples.groups[group].labels) // recipe.batch
        held_out = list(islice(batches(samples, group, recipe.batch), max(1, full_batches)))
        data = batches(samples, "train", recipe.batch)
        fit(model, islice(data, recipe.iterations), recipe.rate, {})
        accuracies = [accuracy(model, held_out)]
        pruned = prune(model, share)
        accuracies.append(accuracy(model, held_out))
        fit(model, islice(data, recipe.iterations), recipe.rate, pruned)
        accuracies.append(accuracy(model, held_out))
    print(
        f"\nVGG-11 of width {width} on {recipe.data.name}, {recipe.iterations} iterations of {recipe.batch} before and "
        f"after pruning: test accuracy {accuracies[0]:.1%}, pruned {accuracies[1]:.1%}, trained on {accuracies[2]:.1%}"
    )
    return model.features, held_out[0][0][:1]


def fit(model: nn.Module, data: Iterator[Batch], rate: float, pruned: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Train with SGD, while pruned weights stay zero.

    Parameters
    ----------
    model : torch.nn.Module
    data : iterator of Batch
        Batches.
    rate : float
        Learning rate.
    pruned : mapping of torch.Tensor to torch.Tensor
        Return value of :func:`prune`.
    """
    optimizer = torch.optim.SGD(model.parameters(), rate, MOMENTUM)
    model.train()
    for images, labels in data:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        # After each step, because momentum and the gradient move pruned weights away from zero.
        for weight, zeros in pruned.items():
            weight.detach().view(-1)[zeros] = 0


@torch.no_grad()
def accuracy(model: nn.Module, data: Sequence[Batch]) -> float:
    """Return the fraction of images that ``model`` classifies correctly.

    Parameters
    ----------
    model : torch.nn.Module
    data : sequence of Batch
        Batches.

    Returns
    -------
    float
    """
    model.eval()
    correct = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in data)
    return correct / sum(len(labels) for _, labels in data)


@torch.no_grad()
def chain(features: nn.Sequential, x: torch.Tensor, *, of_sample: bool) -> list[SparseJacobian]:
    """Return the transposed Jacobians of the features at one sample, the last layer's first.

    Pruned weights are not stored.

    Parameters
    ----------
    features : torch.nn.Sequential
    x : torch.Tensor
        The sample.
    of_sample : bool
        True also leaves out the zeros that ReLU and pooling have at this sample. Such Jacobians do not apply to
        other samples.

    Returns
    -------
    list of SparseJacobian
    """
    jacobians = []
    for layer in features:
        y = layer(x)
        if isinstance(layer, nn.Conv2d):
            jacobians.append(batched_conv2d(layer.weight, x.shape[1], _windows(layer, x), pruned=True))
        else:
            jacobian = cast(SparseJacobian, transposed_jacobian(layer, x, y))
            jacobians.append(_without_zeros(jacobian) if of_sample else jacobian)
        x = y
    return jacobians[::-1]


def _without_zeros(jacobian: SparseJacobian) -> SparseJacobian:
    """Return the Jacobian of one sample with a pattern that has its non-zeros only."""
    pattern, values = jacobian.pattern, jacobian.values[0]
    is_kept = values != 0
    # ``order`` is the order in which the new pattern stores the values.
    kept, order = Pattern.from_positions(pattern.rows[is_kept], pattern.col[is_kept], pattern.shape)
    return SparseJacobian(kept, values[is_kept][order][None])


def _windows(layer: nn.Conv2d, x: torch.Tensor) -> Windows:
    return Windows.build(tuple(x.shape[2:]), layer.kernel_size, layer.stride, cast(Two, layer.padding), layer.dilation)


def baseline_flops(features: nn.Sequential, x: torch.Tensor) -> list[int]:
    """Return the FLOP of each operator of BP, last layer first, zeros included; moving a value counts as one.

    Parameters
    ----------
    features : torch.nn.Sequential
    x : torch.Tensor
        Input of the features.

    Returns
    -------
    list of int
    """
    flops = []
    for layer in features:
        y = layer(x)
        if isinstance(layer, nn.Conv2d):
            # Pairs of an output and an input position within the image: products with the padding do not count.
            position_pairs = len(_windows(layer, x).pairs()[0])
            flops.append(2 * position_pairs * layer.in_channels * layer.out_channels // layer.groups)
        else:
            flops.append(x.numel() + y.numel())
        x = y
    return flops[::-1]


def table(share: float, width: int = 64, seed: int = 0, recipe: PrunedVggRecipe | None = None) -> Rows:
    """Print the steps of the scan, linear and truncated, and those of BP.

    Parameters
    ----------
    share : float
        Pruned fraction of the weights.
    width : int
        Channels of the first layer.
    seed : int
        Seed.
    recipe : PrunedVggRecipe, optional
        Training before. None: random weights.

    Returns
    -------
    list of dict
        A row for each level.
    """
    torch.manual_seed(seed)
    if recipe is not None:
        features, x = retrained(recipe, share, width)
    else:
        features, x = vgg11(width).features, torch.randn(1, 3, 32, 32)
        prune(features, share)
    with torch.no_grad():
        bp = baseline_flops(features, x)
    up, down = sweep_levels(len(features))
    print(f"\nFigure 10, VGG-11 with {share:.0%} of its weights pruned, {len(features)} layers, one sample, MFLOP")
    print(f"the complete scan has L0-L{up} upwards and L{up + 1}-L{up + down + 1} downwards; ", end="")
    print(f"truncated: L0-L{DEPTH}, linear, the last {DEPTH} levels downwards")
    print(f"{'zeros':<14}{'method':<11}{'phase':<12}{'level':>6}{'kind':>6}{'steps':>7}{'largest':>10}", end="")
    print(f"{'total':>10}{'critical':>10}")
    rows: Rows = []
    # The authors' program leaves out the zeros of one sample. Jacobians for several samples have to keep them.
    for zeros, of_sample in (("guaranteed", False), ("this sample's", True)):
        jacobians = chain(features, x, of_sample=of_sample)
        for method, depth in (("linear", 0), ("truncated", DEPTH)):
            with recorded() as steps:
                # The gradient's values do not matter: patterns determine the FLOP. Depth 0 is a linear scan.
                backpropagate(torch.ones(1, jacobians[0].shape[2]), jacobians, "truncated", depth=depth)
            rows += _print_levels(f"{zeros:<14}{method:<11}", steps)
    rows += [_print(f"{'none':<14}{'BP':<11}", "all", len(bp), (max(bp), sum(bp), sum(bp)))]
    return rows


def _print_levels(name: str, steps: Sequence[Step]) -> Rows:
    path = critical_path(steps)
    rows: Rows = []
    for key in dict.fromkeys((step.phase, step.level, step.kind) for step in steps):
        here, on_path = ([s for s in taken_steps if (s.phase, s.level, s.kind) == key] for taken_steps in (steps, path))
        largest = max(step.flops for step in here)
        flops = largest, _total_flops(here), _total_flops(on_path)
        rows.append(_print(name, f"{key[0]:<12}{key[1]:>6}{key[2]:>6}", _product_count(here), flops))
    largest = max(step.flops for step in steps)
    return [*rows, _print(name, "all", _product_count(steps), (largest, _total_flops(steps), _total_flops(path)))]


def _print(name: str, where: str, count: int, flops: tuple[int, int, int]) -> dict[str, object]:
    print(f"{name}{where:<24}{count:>7}" + "".join(f"{each / 1e6:>10.2f}" for each in flops))
    row: dict[str, object] = {"method": " ".join(name.split()), "where": " ".join(where.split()), "steps": count}
    return row | dict(zip(("largest", "total", "critical"), flops, strict=True))


def _product_count(steps: Sequence[Step]) -> int:
    return sum(step.count for step in steps)


def _total_flops(steps: Sequence[Step]) -> int:
    return sum(step.flops * step.count for step in steps)
