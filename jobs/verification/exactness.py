"""Compare training over a grid with plain torch on one process: losses of every step and the final weights.

Both take the same float64 steps on the same samples; the reference uses no distributed tensor at all. The models for
mesh tangling train as ``train mesh`` does, from a file; all others on random samples. The effect of round-off alone is
shown by plain torch with the samples of each batch in reverse order, or with random samples changed by 1e-15.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from mpi4py import MPI

from distconv.errors import DataError
from distconv.grid import ProcessGrid
from distconv.jobs.mesh.samples import MeshSamples
from distconv.jobs.mesh.segmentation import MeshSettings, MeshTrainer
from distconv.jobs.mesh.synthetic_samples import write_synthetic
from distconv.jobs.planning.options import run_on_rank_0
from distconv.jobs.training import settings as common
from distconv.jobs.training.options import grid_shape, positive_float, positive_int
from distconv.layers.models import MESH_MODELS, MODELS
from distconv.parallel import parallelize
from distconv.placement import scatter
from distconv.plan import format_parts

EXAMPLES = """\
examples:
  mpiexec -n 4 distconv verify exactness --grid n=2,h=2 --model mesh1k --size 50x36
  mpiexec -n 4 distconv verify exactness --grid h=2,w=2 --model resnet50 --size 67x53 --width 16
"""

LOSS_LIMIT, WEIGHT_LIMIT = 1e-10, 1e-9
RATE = 3e-4
"""Default learning rate.

At a few times this rate, training of mesh1k on small samples is chaotic, since its last batch norms normalize over one
cell of each of four samples. In 20 steps any round-off then grows to 1e-8, even that of reordered sums on one process.
"""
SMALLEST = 1e-6
"""Lower bound of the value that differences are relative to.

The gradient of a bias in front of a batch norm is round-off only, so its relative difference has no meaning.
"""


@dataclass(frozen=True)
class Run:
    """Losses of all steps, and the final parameters and buffers by name."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """Largest relative difference of a loss, and of a weight relative to the largest in its tensor."""

    loss: float
    weight: float

    @property
    def exact(self) -> bool:
        """True if both differences are within the limits, which allow for sums in another order. Otherwise False."""
        return self.loss <= LOSS_LIMIT and self.weight <= WEIGHT_LIMIT


def train(
    settings: MeshSettings,
    path: str | os.PathLike[str],
    grid: ProcessGrid,
    *,
    plain: bool = False,
    reverse: bool = False,
) -> Run:
    """Take all training steps on mesh samples.

    Parameters
    ----------
    settings : MeshSettings
    path : str or os.PathLike
        File of the samples.
    grid : ProcessGrid
    plain : bool
        True passes ordinary tensors to the ordinary model, on a grid of one rank.
    reverse : bool
        True reverses the order of samples in each batch, which changes the order of sums only.

    Returns
    -------
    Run
    """
    samples = MeshSamples(path, grid.world)
    trainer = MeshTrainer(settings, samples, grid)
    losses = []
    for batch in trainer.batches():
        inputs, labels = (tensor.local if plain else tensor for tensor in batch.tensors)
        if reverse:
            inputs, labels = inputs.flip(0), labels.flip(0)
        losses.append(trainer.step(inputs, labels))
    samples.close()
    return Run(losses, {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()})


@dataclass(frozen=True)
class RandomSamples:
    """Samples (C, [D,] H, W) of normal numbers, with targets for a model that ``predicts`` these ``classes``."""

    sample: tuple[int, ...]
    classes: int
    predicts: str

    def batch(self, samples: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of one step, the same on all ranks.

        Parameters
        ----------
        samples : int
            Samples of the batch.
        step : int

        Returns
        -------
        (torch.Tensor, torch.Tensor)
        """
        random = torch.Generator().manual_seed(step)
        x = torch.randn((samples, *self.sample), generator=random, dtype=torch.float64)
        if self.predicts == "values":
            return x, torch.randn((samples, self.classes), generator=random, dtype=torch.float64)
        labelled = self.sample[1:] if self.predicts == "cells" else ()
        return x, torch.randint(max(2, self.classes), (samples, *labelled), generator=random)

    @property
    def target_axes(self) -> tuple[str | None, ...]:
        """Return the grid axis of each dimension of the targets."""
        space = tuple("dhw"[4 - len(self.sample) :]) if self.predicts == "cells" else ()
        return ("n", None) if self.predicts == "values" else ("n", *space)

    def loss(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error for values, and the cross entropy for classes (binary for one class).

        Parameters
        ----------
        y : torch.Tensor
            Output of the model.
        target : torch.Tensor

        Returns
        -------
        torch.Tensor
        """
        if self.predicts == "values":
            return F.mse_loss(y, target)
        if self.classes == 1:
            return F.binary_cross_entropy_with_logits(y.squeeze(1), target.to(y.dtype))
        return F.cross_entropy(y, target)


def train_at_random(
    settings: common.TrainingSettings, samples: RandomSamples, grid: ProcessGrid | None, *, nudged: bool = False
) -> Run:
    """Take all training steps of a reference model on random samples.

    Parameters
    ----------
    settings : common.TrainingSettings
    samples : RandomSamples
    grid : ProcessGrid or None
        Grid of the model. None: plain torch on this rank.
    nudged : bool
        True changes the inputs by a relative 1e-15.

    Returns
    -------
    Run
    """
    torch.manual_seed(settings.seed)
    width = {} if settings.width is None else {"width": settings.width}
    model = MODELS[settings.model](in_channels=samples.sample[0], classes=samples.classes, **width).double()
    if grid is not None:
        parallelize(model, grid)
    optimizer = common.make_optimizer(settings, model.parameters())
    losses = []
    for step in range(settings.steps or 1):
        x, target = samples.batch(settings.batch, step)
        if nudged:  # about the precision of float64: this shows how much round-off grows during the steps
            x = x * (1 + 1e-15)
        if grid is not None:
            x, target = scatter(x, grid), scatter(target, grid, dims=samples.target_axes)
        optimizer.zero_grad()
        loss = samples.loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Run(losses, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})


def reference(
    settings: MeshSettings, path: str | os.PathLike[str], comm: MPI.Intracomm, *, reverse: bool = False
) -> Run:
    """Train the same steps with plain torch, on rank 0 alone. Collective.

    Parameters
    ----------
    settings : MeshSettings
    path : str or os.PathLike
        File of the samples.
    comm : mpi4py.MPI.Intracomm
    reverse : bool
        As in :func:`train`.

    Returns
    -------
    Run
    """
    own = ProcessGrid(MPI.COMM_SELF)
    return run_on_rank_0(comm, lambda: train(settings, path, own, plain=True, reverse=reverse))


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest number in ``expected``.

    Parameters
    ----------
    actual : torch.Tensor
    expected : torch.Tensor

    Returns
    -------
    float
    """
    largest = (actual.double() - expected.double()).abs().max()
    return float(largest / expected.double().abs().max().clamp_min(SMALLEST))


def difference(run: Run, reference: Run) -> Difference:
    """Return the difference between two runs.

    Parameters
    ----------
    run : Run
    reference : Run
        The run of plain torch.

    Returns
    -------
    Difference
    """
    loss = max(abs(a - b) / abs(b) for a, b in zip(run.losses, reference.losses, strict=True))
    weight = max(relative(run.weights[name], expected) for name, expected in reference.weights.items())
    return Difference(loss, weight)


def compare_mesh(
    settings: MeshSettings, size: tuple[int, int], comm: MPI.Intracomm, axes: Mapping[str, int]
) -> list[Difference]:
    """Compare runs over a grid, and with reordered sums, with plain torch, on mesh samples from a file. Collective.

    Parameters
    ----------
    settings : MeshSettings
    size : (int, int)
        Height and width of the samples.
    comm : mpi4py.MPI.Intracomm
    axes : mapping of str to int
        Size of each grid axis.

    Returns
    -------
    list of Difference
    """
    # The first difference is that of the grid, the second one that of round-off alone.
    grid = ProcessGrid(comm, **axes)
    with tempfile.TemporaryDirectory() as own:
        path = Path(comm.bcast(own)) / "synthetic.h5"  # in the folder of rank 0, on all ranks
        if comm.rank == 0:
            write_synthetic(path, size)
        comm.Barrier()
        expected = reference(settings, path, comm)
        yardstick = difference(reference(settings, path, comm, reverse=True), expected)
        deviation = difference(train(settings, path, grid), expected)
        comm.Barrier()  # rank 0 deletes its folder at the end of this block, when all ranks have closed the file
    return [deviation, yardstick]


def compare_at_random(
    settings: common.TrainingSettings, size: tuple[int, ...], comm: MPI.Intracomm, axes: Mapping[str, int]
) -> list[Difference]:
    """Compare runs over a grid, and with changed inputs, with plain torch, on random samples. Collective.

    Parameters
    ----------
    settings : common.TrainingSettings
    size : tuple of int
        Size of the samples.
    comm : mpi4py.MPI.Intracomm
    axes : mapping of str to int
        Size of each grid axis.

    Returns
    -------
    list of Difference
    """
    grid = ProcessGrid(comm, **axes)
    model = MODELS[settings.model]
    samples = RandomSamples((model.sample[0], *size), 10, model.predicts)
    expected = run_on_rank_0(comm, lambda: train_at_random(settings, samples, None))
    yardstick = difference(run_on_rank_0(comm, lambda: train_at_random(settings, samples, None, nudged=True)), expected)
    deviation = difference(train_at_random(settings, samples, grid), expected)
    return [deviation, yardstick]


def extents(text: str) -> tuple[int, ...]:
    """Read ``64x48``.

    Raises
    ------
    ArgumentTypeError
        If ``text`` is not such extents.
    """
    try:
        return tuple(positive_int(word) for word in text.split("x"))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not the extents of an image, such as 64x48") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv verify exactness``."""
    parser.add_argument(
        "--grid", type=grid_shape, default={"n": 1}, metavar="n=2,h=2", help="process grid (default: n=1)"
    )
    parser.add_argument(
        "--model",
        default="unet",
        choices=MODELS,
        metavar="NAME",
        help=f"network: {', '.join(MODELS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--size",
        type=extents,
        metavar="64x48",
        help="height and width of the samples (default: 64x64 for mesh tangling, else the model's own)",
    )
    parser.add_argument(
        "--width", type=positive_int, help="channels of the model (default: 8 for mesh tangling, else the model's own)"
    )
    parser.add_argument("--optimizer", default="adam", choices=("adam", "sgd"), help="optimizer (default: %(default)s)")
    parser.add_argument("--lr", type=positive_float, default=RATE, help="learning rate (default: %(default)s)")
    parser.add_argument(
        "--steps", type=positive_int, default=20, help="number of training steps (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Print the differences; 0 if they are within the limits, else 1. Collective over MPI.COMM_WORLD.

    Raises
    ------
    DataError
        If ``--size`` has not as many extents as the samples of the model.
    """
    comm = MPI.COMM_WORLD
    mesh = options.model in MESH_MODELS
    own = MODELS[options.model].sample[1:]
    size = options.size or ((64, 64) if mesh else own)
    if len(size) != len(own):
        example = "x".join(map(str, (size * len(own))[: len(own)]))
        raise DataError(
            f"--size {'x'.join(map(str, size))}: samples of {options.model} have {len(own)} extents, not {len(size)}; "
            f"for example --size {example}"
        )
    settings = MeshSettings(
        options.model,
        options.width or (8 if mesh else None),
        batch=4,
        steps=options.steps,
        optimizer=options.optimizer,
        dtype="float64",
        lr=options.lr,
    )
    compare: Callable[..., list[Difference]] = compare_mesh if mesh else compare_at_random
    deviation, yardstick = compare(settings, size, comm, options.grid)
    if comm.rank == 0:
        changed = "with each batch reversed" if mesh else "with inputs changed by 1e-15"
        print(
            f"{options.model} width {settings.width or 'as published'}, {'x'.join(map(str, size))}, batch 4, "
            f"{options.steps} steps of {options.optimizer}, float64, "
            f"grid {format_parts(options.grid)}: losses differ by {deviation.loss:.1e}, weights by "
            f"{deviation.weight:.1e}: {'equal' if deviation.exact else 'NOT EQUAL'} (plain torch {changed}: "
            f"{yardstick.loss:.1e}, {yardstick.weight:.1e})"
        )
    return 0 if deviation.exact else 1
