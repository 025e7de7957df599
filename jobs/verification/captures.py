"""Compare captured training steps with eager ones, bit for bit, on the random networks of ``verify differential``.

A network is trained twice over the same grid from the same weights, once with ``dc.capture`` and once without. Losses,
outputs, gradients, weights and buffers of all steps and the state of the random generator must be identical bit for
bit. A step that cannot be captured raises, and its error is reported. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import copy
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

from distconv.capture.captured import capture
from distconv.errors import CaptureError
from distconv.grid import ProcessGrid
from distconv.jobs.training.options import nonnegative_int, positive_int
from distconv.jobs.verification.differential import networks
from distconv.jobs.verification.differential.draw import Draw
from distconv.jobs.verification.differential.layouts import draw_extents
from distconv.jobs.verification.engine.backends import ReferenceBackend
from distconv.jobs.verification.engine.layouts import CaseLayout
from distconv.layers.common import call_site
from distconv.parallel import parallelize
from distconv.placement import gather, scatter
from distconv.tensor import DistTensor

EXAMPLES = """\
examples:
  mpiexec -n 4 distconv verify capture --cases 500
  mpiexec -n 3 distconv verify capture --seed 1 --first 17 --cases 1
"""

STEPS = 5
"""Steps of each network. Some replays then find no gradients, and others accumulate into existing gradients."""

Left = list[tuple[str, torch.Tensor | None]]
"""Tensors that training leaves, with their names."""

Train = Callable[[bool], Left]
"""Trains a network from its start, with captured steps or without."""

EXACT, REFUSED, UNSUPPORTED, DIFFERENT = "exact", "refused", "unsupported", "DIFFERENT"
"""Verdicts.

``EXACT``: the results are identical. ``REFUSED``: the capture raised CaptureError. ``UNSUPPORTED``: the eager training
raised an error. ``DIFFERENT``: the results differ, or the captured training raised another error.
"""


def verdict(comm: MPI.Intracomm, train: Train) -> tuple[str, str]:
    """Return the verdict on training with captured steps, and its reason. Collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    train : Train
        Trains with and without capture.

    Returns
    -------
    (str, str)
        The verdict and its reason.
    """
    expected, failure = _attempt(comm, lambda: train(False))
    if failure is not None:
        return UNSUPPORTED, failure
    outcome, failure = _attempt(comm, lambda: train(True))
    if failure is not None:
        return (REFUSED if failure.startswith(CaptureError.__name__) and "differs from the eager step" not in failure
                else DIFFERENT), failure  # fmt: skip
    assert expected is not None
    assert outcome is not None
    wrong = next(filter(None, comm.allgather(_first_difference(expected, outcome))), "")
    return (DIFFERENT, wrong) if wrong else (EXACT, "")


def _attempt(comm: MPI.Intracomm, attempt: Callable[[], Left]) -> tuple[Left | None, str | None]:
    outcome, text = None, None
    call_site.clear_warned_sites()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            outcome = attempt()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    # A failure on any rank counts for all, so that all ranks make the same collective calls afterwards.
    failures = [each for each in comm.allgather(text) if each is not None]
    return outcome, failures[0] if failures else None


def _first_difference(expected: Left, actual: Left) -> str:
    if [name for name, _ in expected] != [name for name, _ in actual]:
        return "other tensors"
    for (name, one), (_, other) in zip(expected, actual, strict=True):
        if (one is None) != (other is None) or (one is not None and other is not None and not _same(one, other)):
            return name
    return ""


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # As bytes: NaN equals itself, and -0 differs from 0.
    mine, its = (t.contiguous().view(-1).view(torch.uint8) if t.numel() else t for t in (one, other))
    return torch.equal(mine, its)


def block(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy of this rank's block of ``tensor``, because a replay may overwrite its memory."""
    local = tensor.local if isinstance(tensor, DistTensor) else tensor
    return None if local is None else local.detach().clone()


def state(model: nn.Module) -> Left:
    """Return parameters, their gradients, buffers, and the state of the random generator."""
    left: Left = [(f"generator {torch.default_generator.device}", torch.get_rng_state())]
    for name, parameter in model.named_parameters():
        left += [(name, block(parameter)), (f"gradient of {name}", block(parameter.grad))]
    return left + [(name, block(buffer)) for name, buffer in model.named_buffers()]


# -- random networks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaptureCase:
    """A network, the options of its training step (``Habits``), and the data of all steps."""

    network: networks.DrawnNetwork
    text: str
    habits: networks.Habits
    loss: str
    images: list[torch.Tensor]
    targets: list[torch.Tensor]
    to_none: bool

    def trainer(self, grid: ProcessGrid) -> Train:
        """Return a trainer over ``grid``."""

        def train(captured: bool) -> Left:
            torch.default_generator.manual_seed(5)  # both trainings draw the same numbers
            model = copy.deepcopy(self.network)
            model = parallelize(model, grid) if self.habits.parallel else model
            return self._train(model, grid, captured)

        return train

    def _train(self, model: nn.Module, grid: ProcessGrid, captured: bool) -> Left:
        habits = self.habits
        if habits.frozen:
            for parameter in next(model.children())[0].parameters():  # type: ignore[index]
                parameter.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        networks.hook(ReferenceBackend(CaseLayout("plain", ())), trained, habits.hooks)
        if habits.hooks == "layer":
            networks.hook_layer(next(m for m in model.modules() if isinstance(m, nn.Conv2d)))
        loss_of = networks.LOSSES[self.loss]

        def step(x: torch.Tensor, target: torch.Tensor) -> Any:
            y = model(x, gather if habits.gathered else _unchanged)
            loss = loss_of(y, gather(target) if habits.gathered else target)
            if habits.l2:
                loss = loss + 0.1 * sum(p.pow(2).sum() for p in trained)
            networks.backward(loss, trained, habits.gradients)
            return loss, y

        data = [self._put(image, target, grid) for image, target in zip(self.images, self.targets, strict=True)]
        taken = capture(step, *data[0]) if captured else step
        optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        left: Left = []
        for number, (x, target) in enumerate(data):
            if number % habits.accumulate == 0:
                optimizer.zero_grad(set_to_none=self.to_none)
            loss, y = taken(x, target)
            left += [(f"loss {number}", block(loss)), (f"y {number}", block(y)), (f"dL/dx {number}", block(x.grad))]
            if (number + 1) % habits.accumulate == 0:
                if habits.clipped:
                    nn.utils.clip_grad_norm_(trained, 0.5)
                optimizer.step()
        return left + state(model)

    def _put(self, image: torch.Tensor, target: torch.Tensor, grid: ProcessGrid) -> tuple[torch.Tensor, torch.Tensor]:
        x = scatter(image, grid)
        x = DistTensor(x.local.detach().clone(), x.dist, x.shape).requires_grad_(self.habits.to_input)
        return x, scatter(target, grid, dims=("n", "h", "w")[: target.dim()])


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def draw_case(seed: int, index: int) -> CaptureCase:
    """Return the case with an index.

    Parameters
    ----------
    seed : int
        Seed.
    index : int
        Index of the case.

    Returns
    -------
    CaptureCase
    """
    draw = Draw(seed, index)
    channels = draw.number(1, 4)
    network, text = networks.draw_network(draw, channels)
    network.train(draw.chance(0.9))
    habits = networks.draw_habits(draw)
    sizes, samples = draw.numbers(2, 4, 11), draw.number(1, 5)
    dtype = draw.pick(torch.float64, torch.float32)
    images = [draw.tensor(samples, 2, *sizes).to(dtype) for _ in range(STEPS)]
    shape = networks.result_shape(network.to(dtype), images[0])
    targets = [draw.classes(samples, *shape[2:], below=networks.CLASSES) for _ in range(STEPS)]
    return CaptureCase(network, text, habits, draw.pick(*networks.LOSSES), images, targets, draw.chance(0.5))


def verdicts(comm: MPI.Intracomm, seed: int, indices: Sequence[int]) -> Iterator[tuple[int, str, str, str]]:
    """Yield the results of cases. Collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    seed : int
        Seed.
    indices : sequence of int
        Indices of the cases.

    Yields
    ------
    (int, str, str, str)
        Index, grid and network, verdict, and reason.
    """
    grids: dict[tuple[tuple[str, int], ...], ProcessGrid] = {}
    for index in indices:
        case = draw_case(seed, index)
        extents = tuple(sorted(draw_extents(comm.size, 2, random.Random(f"{seed}/{index}/{comm.size}")).items()))
        if extents not in grids:
            grids[extents] = ProcessGrid(comm, **dict(extents))
        grid = grids[extents]
        what, why = verdict(comm, case.trainer(grid))
        yield index, f"{grid.describe()}: {case.text}; {case.loss}; {case.habits}", what, why


# -- the command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv verify capture``."""
    parser.add_argument(
        "--cases", type=positive_int, default=500, metavar="N", help="number of random cases (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=nonnegative_int, default=0, help="seed from which the cases are drawn (default: %(default)s)"
    )
    parser.add_argument(
        "--first",
        type=nonnegative_int,
        default=0,
        metavar="NUMBER",
        help="index of the first case (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Run the cases. Collective over MPI.COMM_WORLD."""
    comm = MPI.COMM_WORLD
    total: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for index, text, what, why in verdicts(comm, options.seed, range(options.first, options.first + options.cases)):
        total[what] += 1
        if what in (REFUSED, UNSUPPORTED):
            reasons[f"{what}: {why}"] += 1
        if comm.rank == 0 and (what == DIFFERENT or options.cases == 1):
            print(f"{what}: case {index}: {text}: {why}", flush=True)
    if comm.rank == 0:
        print("\n".join(f"{count} times {reason}" for reason, count in reasons.most_common(20)))
        counts = ", ".join(f"{total[each]} {each}" for each in (EXACT, REFUSED, UNSUPPORTED, DIFFERENT))
        print(f"{comm.size} ranks, seed {options.seed}, {STEPS} steps each: {counts}", flush=True)
    return int(bool(total[DIFFERENT]))
