"""Compare the accuracy of SparsePipe's sparse VGG16-BN with its dense equivalent after a short training.

Both are trained with several seeds. They start from the same weights and train on the same voxels in the same order,
with the same optimizer and learning rates. The dense network also computes where there is no voxel. Several resolutions
reproduce the accuracies of Figure 8. Runs in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from mpi4py import MPI

from distconv.errors import DataError
from distconv.jobs.papers.printed_tables import Rows, add_json_argument, print_tables
from distconv.jobs.pointcloud.batches import VoxelRecipe, voxel_batch
from distconv.jobs.pointcloud.classification.samples import CloudSamples
from distconv.jobs.pointcloud.clouds import Clouds
from distconv.jobs.training.options import nonnegative_int, positive_float, positive_int
from distconv.jobs.training.settings import learning_rate, set_learning_rate
from distconv.layers.models.sparse import dense_vgg16_bn, sparse_vgg16_bn
from distconv.layers.sparse import SparseTensor, to_dense

EXAMPLES = """\
examples:
  distconv reproduce sparsepipe-accuracy --data modelnet10.h5
  distconv reproduce sparsepipe-accuracy --epochs 1 --train 100 --test 50 --seeds 0
  distconv reproduce sparsepipe-accuracy --data modelnet10.h5 --networks sparse --resolution 16 32 50 100
"""

NETWORKS = {"sparse": sparse_vgg16_bn, "dense": dense_vgg16_bn}
"""Builders of the two networks, which have the same parameters by name and shape."""

LEAST = 32
"""Minimum number of voxels along each side for the dense network, whose five poolings each halve them."""

EVALUATED = 32
"""Clouds per batch in evaluation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv reproduce sparsepipe-accuracy``."""
    parser.add_argument(
        "--data", type=Path, metavar="PATH", help="HDF5 file or folder of point clouds (default: embedded shapes)"
    )
    parser.add_argument(
        "--seeds",
        type=nonnegative_int,
        nargs="+",
        default=[0, 1, 2],
        metavar="N",
        help="random seeds, one run for each (default: 0 1 2)",
    )
    for name, value, text in (
        ("train", 600, "number of training clouds"),
        ("test", 300, "number of test clouds"),
        ("epochs", 4, "number of training epochs"),
        ("batch", 16, "clouds per step"),
        ("points", 1024, "points drawn from each cloud"),
        ("width", 8, "filters of the first layer, 64 in the paper"),
    ):
        parser.add_argument(
            f"--{name}", type=positive_int, default=value, metavar="N", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--resolution",
        type=positive_int,
        nargs="+",
        default=[32],
        metavar="N",
        help="voxels along each side, one or more values (default: 32)",
    )
    parser.add_argument(
        "--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="networks to train (default: both)"
    )
    parser.add_argument(
        "--lr", type=positive_float, default=2e-3, help="peak learning rate of Adam (default: %(default)s)"
    )
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Print the tables on rank 0. Collective over MPI.COMM_WORLD.

    Raises
    ------
    DataError
        If a resolution is too small for the dense network.
    """
    if "dense" in options.networks and min(options.resolution) < LEAST:
        raise DataError(
            f"--resolution {min(options.resolution)}: too small for the dense network, which halves each side five "
            f"times. Use at least {LEAST}, or --networks sparse."
        )
    print_tables(lambda: {"accuracy": _print_tables(options)}, options.json)
    return 0


@dataclass(frozen=True)
class Subset:
    """Some clouds of a group (training or test), by their indices in the group."""

    clouds: Clouds
    indices: tuple[int, ...]

    @classmethod
    def of(cls, clouds: Clouds, count: int) -> Subset:
        """Return clouds chosen at random, the same ones in each call.

        Parameters
        ----------
        clouds : Clouds
        count : int
            Number of clouds, at most all.

        Returns
        -------
        Subset
        """
        # A fixed seed: --seeds varies the training, not the data.
        order = np.random.default_rng(0).permutation(len(clouds.labels))
        return cls(clouds, tuple(map(int, order[:count])))


def _print_tables(options: argparse.Namespace) -> Rows:
    with closing(CloudSamples(options.data, MPI.COMM_SELF)) as samples:
        parts = {group: Subset.of(samples.groups[group], getattr(options, group)) for group in ("train", "test")}
        print(
            f"VGG16-BN of width {options.width} on {samples.name}: "
            f"{', '.join(f'{len(part.indices)} clouds to {group}' for group, part in parts.items())}, "
            f"{options.epochs} epochs of batches of {options.batch}, {torch.get_num_threads()} threads"
        )
        rows: Rows = []
        for resolution in options.resolution:
            rows += _print_resolution(resolution, parts, len(samples.class_names), options)
    return rows


def _print_resolution(resolution: int, parts: dict[str, Subset], classes: int, options: argparse.Namespace) -> Rows:
    kinds = options.networks
    print(
        f"\n{resolution}^3\n{'seed':>4}" + "".join(f"{f'{kind} {unit}':>10}" for unit in ("%", "s") for kind in kinds)
    )
    rows: Rows = []
    accuracies: dict[str, list[float]] = {kind: [] for kind in kinds}
    for seed in options.seeds:
        results = {kind: trained(kind, seed, parts, classes, options, resolution=resolution) for kind in kinds}
        for kind, (accuracy, _) in results.items():
            accuracies[kind].append(accuracy)
        percentages = "".join(f"{100 * accuracy:>10.2f}" for accuracy, _ in results.values())
        print(f"{seed:>4}{percentages}" + "".join(f"{seconds:>10.1f}" for _, seconds in results.values()), flush=True)
        by_network = {kind: {"accuracy": a, "training_s": s} for kind, (a, s) in results.items()}
        rows.append({"resolution": resolution, "seed": seed, **by_network})
    means = {kind: 100 * statistics.mean(values) for kind, values in accuracies.items()}
    print("mean" + "".join(f"{mean:>10.2f}" for mean in means.values()))
    if len(means) == len(NETWORKS):
        gain = means["sparse"] - means["dense"]
        print(f"in the mean the sparse network is {gain:+.2f} points from the dense one (Table II, 32^3: +1.82)")
    return rows


def trained(
    kind: str, seed: int, parts: dict[str, Subset], classes: int, options: argparse.Namespace, *, resolution: int
) -> tuple[float, float]:
    """Train the sparse or the dense network.

    Parameters
    ----------
    kind : str
        ``sparse`` or ``dense``.
    seed : int
        Seed.
    parts : dict of str to Subset
        Training and test clouds.
    classes : int
        Number of classes.
    options : argparse.Namespace
        Options of the command.
    resolution : int
        Voxels along each side.

    Returns
    -------
    (float, float)
        Accuracy on the test clouds, and seconds of training.
    """
    torch.manual_seed(seed)
    # Both networks begin with the weights that the sparse one draws; the dense one would draw others.
    weights = sparse_vgg16_bn(options.width, classes=classes).state_dict()
    model = NETWORKS[kind](options.width, classes=classes)
    model.load_state_dict(weights)
    optimizer = torch.optim.Adam(model.parameters(), options.lr)
    steps, step = options.epochs * -(-len(parts["train"].indices) // options.batch), 0
    # Again, because building the networks drew different amounts of random numbers: dropout must draw the same ones.
    torch.manual_seed(seed)
    begin = time.perf_counter()
    for epoch in range(options.epochs):
        order = np.random.default_rng((seed, epoch)).permutation(parts["train"].indices)
        recipe = VoxelRecipe(resolution, options.points, seed=seed)
        for x, labels in _batches(kind, Subset(parts["train"].clouds, tuple(order)), options.batch, recipe, epoch):
            set_learning_rate(optimizer, learning_rate(step, steps, options.lr))
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels).backward()
            optimizer.step()
            step += 1
    seconds = time.perf_counter() - begin
    return _accuracy(kind, model.eval(), parts["test"], VoxelRecipe(resolution, options.points)), seconds


@torch.no_grad()
def _accuracy(kind: str, model: torch.nn.Module, part: Subset, recipe: VoxelRecipe) -> float:
    correct = sum(
        int((model(x).argmax(1) == labels).sum()) for x, labels in _batches(kind, part, EVALUATED, recipe, epoch=0)
    )
    return correct / len(part.indices)


def _batches(
    kind: str, part: Subset, batch: int, recipe: VoxelRecipe, epoch: int
) -> Iterator[tuple[SparseTensor | torch.Tensor, torch.Tensor]]:
    for start in range(0, len(part.indices), batch):
        samples = [int(index) for index in part.indices[start : start + batch]]
        voxels = voxel_batch(part.clouds, samples, recipe, epoch)
        x = SparseTensor(voxels.coords, voxels.features, batch_size=len(samples))
        yield (x if kind == "sparse" else to_dense(x, [recipe.resolution] * 3)), voxels.labels.long()
