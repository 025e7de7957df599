"""Recipes of the staleness experiment: hyperparameters and variants of each network.

Source: stale weights (Zhang, Abdelrahman 2021), appendix A: mini-batch, learning rates and their decay, momentum,
weight decay; appendix B for ResNet-56.

Choices that the paper leaves open, made here:

- The constants of the inverse policy are those of Caffe's LeNet example.
- A rate that is "decreased twice" falls after a half and three quarters of the iterations (He et al. 2016).
- The augmentation is crop and flip.
- AlexNet's placements are chosen here. ResNet-56 is split after residual group 1, as in Table 5, and its
  rate is the nonpipelined one, since the text lacks those of Table 8.

A rate falls at the same fraction of the iterations for any number of iterations.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from distconv.errors import DistconvError

MOMENTUM = 0.9
"""Momentum of SGD in all recipes (appendix A)."""

PIPELINED_SHARE = 2 / 3
"""Pipelined fraction of a hybrid's iterations (20,000 of 30,000 in the paper's Figure 7)."""


class VariantError(DistconvError, ValueError):
    """A string that is not a valid variant."""


@dataclass(frozen=True)
class TrainingVariant:
    """One way to train: pipelined with registers after the layers of ``placement``, or not pipelined if it is empty.

    A register is a stage boundary. Layers are counted from 1.
    A ``hybrid`` continues without pipelining after ``PIPELINED_SHARE`` of its iterations. With ``stash``, a backward
    pass uses the weights of its forward pass, as in PipeDream (6.7), and otherwise the newest ones. ``rate`` is the
    learning rate of all iterations. None selects the recipe's rates for pipelined and for other iterations.

    >>> TrainingVariant.parse("hybrid:7,13@0.01")
    TrainingVariant(placement=(7, 13), hybrid=True, stash=False, rate=0.01)
    """

    placement: tuple[int, ...] = ()
    hybrid: bool = False
    stash: bool = False
    rate: float | None = None

    @classmethod
    def parse(cls, text: str) -> TrainingVariant:
        """Parse a variant: ``nonpipelined``, ``7,13``, ``hybrid:7,13`` or ``stash:7,13``, perhaps with ``@RATE``.

        Raises
        ------
        VariantError
            If the string is not a valid variant.
        """
        match = re.fullmatch(r"(?:nonpipelined|(hybrid:|stash:)?(\d+(?:,\d+)*))(?:@(\d*\.?\d+(?:e[+-]?\d+)?))?", text)
        if match is None or (match[3] and not float(match[3])):
            raise VariantError(
                f"--variants: {text!r} is not a valid variant. Use nonpipelined, the layers that registers follow "
                "(7,13), hybrid:7,13 or stash:7,13, each with @RATE for another learning rate than the recipe's."
            )
        kind, layers, rate = match.groups()
        placement = tuple(map(int, layers.split(","))) if layers else ()
        return cls(placement, kind == "hybrid:", kind == "stash:", float(rate) if rate else None)

    def __str__(self) -> str:
        text = ",".join(map(str, self.placement)) if self.placement else "nonpipelined"
        return (
            ("hybrid:" if self.hybrid else "stash:" if self.stash else "")
            + text
            + (f"@{self.rate:g}" if self.rate else "")
        )

    def pipelined(self, iterations: int) -> int:
        """Return the number of iterations that are pipelined, which are the first ones."""
        if not self.placement:
            return 0
        return round(PIPELINED_SHARE * iterations) if self.hybrid else iterations


@dataclass(frozen=True)
class TrainingRecipe:
    """Settings of a network's training."""

    batch: int
    rate: float
    """Learning rate of iterations that are not pipelined."""
    pipelined_rate: float
    """Learning rate of pipelined iterations."""
    weight_decay: float
    falls: Callable[[float], float]
    """Returns the factor on the learning rate after a fraction of the iterations, from 0 to 1."""
    falls_in_words: str
    """Description of ``falls`` in the printed settings."""
    iterations: int
    """Default number of iterations. The paper has ``paper_iterations``."""
    paper_iterations: int
    variants: tuple[str, ...]
    """Variants that are trained by default."""
    nesterov: bool = False
    augment: str = ""
    """Augmentation of the training images, as the option ``--augment`` of ``distconv train classify`` has it."""

    def rate_of(self, variant: TrainingVariant, iteration: int, iterations: int, schedule: int) -> float:
        """Return the learning rate of an iteration.

        Parameters
        ----------
        variant : TrainingVariant
        iteration : int
            Iteration, counted from 0.
        iterations : int
            Number of iterations of the run.
        schedule : int
            Number of iterations over which the learning rate decays.

        Returns
        -------
        float
        """
        of_kind = self.pipelined_rate if iteration < variant.pipelined(iterations) else self.rate
        return (variant.rate or of_kind) * self.falls(iteration / schedule)


RECIPES = {
    "lenet5": TrainingRecipe(
        batch=100,
        rate=0.01,
        pipelined_rate=0.01,
        weight_decay=5e-4,
        # Caffe's policy "inv": (1 + gamma * iteration)^-power with gamma 1e-4 and power 0.75, for 30,000 iterations.
        falls=lambda done: (1 + 1e-4 * 30_000 * done) ** -0.75,
        falls_in_words="times (1 + 3 x fraction done)^-0.75",
        iterations=6_000,
        paper_iterations=30_000,
        variants=("nonpipelined", "1", "1,2", "1,2,3", "1,2,3,4"),
    ),
    "alexnet": TrainingRecipe(
        batch=100,
        rate=0.001,
        pipelined_rate=0.001,
        weight_decay=4e-3,
        falls=lambda done: 0.1 ** ((done >= 1 / 2) + (done >= 3 / 4)),
        falls_in_words="by 10 after 1/2 and 3/4",
        iterations=2_000,
        paper_iterations=250_000,
        variants=("nonpipelined", "1", "1,2", "1,2,3"),
        nesterov=True,
        augment="crop,flip",
    ),
    "resnet20": TrainingRecipe(
        batch=128,
        rate=0.1,
        pipelined_rate=0.01,
        weight_decay=1e-4,
        falls=lambda done: 0.1 ** ((done >= 1 / 2) + (done >= 3 / 4)),
        falls_in_words="by 10 after 1/2 and 3/4",
        iterations=3_100,
        paper_iterations=100_000,
        variants=("nonpipelined", "nonpipelined@0.01", "7", "7,13", "7,13,19", "hybrid:7,13,19"),
        augment="crop,flip",
    ),
    "resnet56": TrainingRecipe(
        batch=128,
        rate=0.1,
        pipelined_rate=0.1,
        weight_decay=1e-4,
        falls=lambda done: 0.1 ** ((done >= 1 / 2) + (done >= 3 / 4)),
        falls_in_words="by 10 after 1/2 and 3/4",
        iterations=1_000,
        paper_iterations=78_000,
        variants=("nonpipelined", "19", "hybrid:19"),
        augment="crop,flip",
    ),
    "vgg16_bn": TrainingRecipe(
        batch=100,
        rate=0.1,
        pipelined_rate=0.1,
        weight_decay=5e-4,
        # "By half every 50 epochs" (appendix A), and 250,000 iterations of 100 samples are 500 epochs of CIFAR-10.
        falls=lambda done: 0.5 ** int(10 * done),
        falls_in_words="by 2 after every tenth",
        iterations=3_000,
        paper_iterations=250_000,
        variants=("nonpipelined", "2", "2,4,7", "2,4,7,10", "hybrid:2,4,7,10"),
        nesterov=True,
        augment="crop,flip",
    ),
}
"""Recipes by the names of ``distconv.layers.models``."""
