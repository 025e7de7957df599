"""The networks of BaPipe's tables as layer profiles of a micro-batch: layer times are the roofline of a machine.

VGG-16 and ResNet-50 are traced at 224 x 224. GNMT-L is worked out by hand, L/2 encoder and L/2 decoder layers of 1024
units: the first encoder layer is bidirectional, and every decoder layer after the first also reads the attention's
context. The paper prints neither the length of its sentences (50 tokens here) nor its vocabulary (32,320 here, that of
the reference implementation).

Source: Zhao et al. 2020 (BaPipe), 4; Wu et al. 2016 (GNMT); Simonyan, Zisserman 2015, table 1, D (VGG-16).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from distconv.layers.models import MODELS
from distconv.layers.models import vgg16 as vgg16_for_cifar
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.machine.machine import Machine, Roofline
from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from distconv.perfmodel.profiles.predicted_profile import predicted_profile

IMAGE = (3, 224, 224)
UNITS = 1024
"""Size of the state of an LSTM layer and of an embedding."""

TOKENS = 50
"""Tokens of each sentence. This is an assumption."""

VOCABULARY = 32320
"""Words of each language. This is the number of the reference implementation, and not in the paper."""

ProfileOf = Callable[[int], Profile]
"""Profile of a micro-batch with the given number of samples."""


def vgg16() -> nn.Module:
    """Return VGG-16 for 224 x 224 images and 1000 classes: 138.4 million parameters."""
    # The model of distconv is for 32 x 32 images, with a smaller classifier. The features are the same.
    classifier = [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    classifier += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 1000)]
    return nn.Sequential(*vgg16_for_cifar().features, *classifier)


def images(model: nn.Module, machine: Machine) -> ProfileOf:
    """Return the profiles of a network for images.

    Parameters
    ----------
    model : torch.nn.Module
    machine : Machine

    Returns
    -------
    ProfileOf
        Returns the profile for a number of samples.
    """
    return lambda samples: predicted_profile(trace(model, (samples, *IMAGE)), machine)


def networks(machine: Machine) -> dict[str, ProfileOf]:
    """Return the networks of Table III."""
    return {
        "VGG-16": images(vgg16(), machine),
        "ResNet-50": images(MODELS["resnet50"](), machine),
        "GNMT-8": lambda samples: gnmt(8, samples, machine),
    }


def gnmt(layers: int, samples: int, machine: Machine) -> Profile:
    """Return the profile of GNMT.

    Parameters
    ----------
    layers : int
        Number of LSTM layers.
    samples : int
        Sentences in each language.
    machine : Machine

    Returns
    -------
    Profile
    """
    network = _Recurrent(samples, machine.compute[0].roofline)
    source = network.embedding("source")
    for index in range(1, layers // 2 + 1):
        # The first layer is bidirectional, so the second one reads two states per token.
        directions = 2 if index == 1 else 1
        source = network.lstm(f"encoder{index}", [source], inputs=2 if index == 2 else 1, directions=directions)
    target = network.embedding("target")
    target = network.lstm("decoder1", [target], inputs=1)
    context = network.attention([source, target])
    for index in range(2, layers // 2 + 1):
        target = network.lstm(f"decoder{index}", [target, context], inputs=2)
    network.loss([target])
    return Profile(network.layers, network.edges)


class _Recurrent:
    """Builder of the layer profile of a recurrent network in float32.

    Each method adds layers that read the named layers, and returns the name of the last one. A backward pass takes
    twice as long as a forward pass with weights (dL/dx and dL/dw), otherwise as long. ``inputs`` are in units of
    ``UNITS``.
    """

    def __init__(self, samples: int, roofline: Roofline) -> None:
        self.samples, self.roofline = samples, roofline
        self.layers: list[Layer] = []
        self.edges: list[tuple[str, str]] = []

    def _add(
        self, name: str, reads: list[str], *, forward: float, backward: float, units: float, weights: float
    ) -> str:
        """Add a layer with ``units`` outputs per token; return its name."""
        self.layers.append(Layer(name, forward, backward, 4.0 * self.samples * TOKENS * units, 4.0 * weights))
        self.edges += [(read, name) for read in reads]
        return name

    def _product(self, rows: int, inputs: int, outputs: int) -> float:
        """Return the seconds of a matrix product."""
        moved = 4.0 * (rows * (inputs + outputs) + inputs * outputs)
        return self.roofline.time(2.0 * rows * inputs * outputs, moved, float(rows * outputs))

    def embedding(self, name: str) -> str:
        """Add a lookup of a row for each token."""
        tokens = self.samples * TOKENS
        # 8 bytes: reads and writes a float32.
        once = self.roofline.time(0.0, 8.0 * tokens * UNITS, float(tokens * UNITS))
        return self._add(
            f"{name}.embedding", [], forward=once, backward=once, units=UNITS, weights=float(VOCABULARY * UNITS)
        )

    def lstm(self, name: str, reads: list[str], inputs: int, directions: int = 1) -> str:
        """Add a layer: a product of all tokens with the input weights, then one per token with recurrent weights."""
        # Four gates. Two layers in the profile, because a split point may lie between them.
        wide, tokens = 4 * UNITS, self.samples * TOKENS
        once = directions * self._product(tokens, inputs * UNITS, wide)
        weights = directions * wide * (inputs * UNITS + 2)  # torch's LSTM has two biases
        gates = self._add(
            f"{name}.input", reads, forward=once, backward=2 * once, units=directions * wide, weights=float(weights)
        )
        # One small product per token, in order: its fixed cost counts TOKENS times.
        steps = directions * TOKENS * self._product(self.samples, UNITS, wide)
        return self._add(
            name,
            [gates],
            forward=steps,
            backward=2 * steps,
            units=directions * UNITS,
            weights=float(directions * wide * UNITS),
        )

    def attention(self, reads: list[str]) -> str:
        """Add attention of each target token over all source tokens: projections, scores and weighted sum."""
        tokens = self.samples * TOKENS
        scores = 2.0 * self.samples * TOKENS * TOKENS * UNITS
        # Scores and weighted sum have as many FLOP each. Together they read three tensors and write one.
        both = self.roofline.time(2 * scores, 16.0 * tokens * UNITS, float(tokens * UNITS))
        once = 2 * self._product(tokens, UNITS, UNITS) + both
        return self._add("attention", reads, forward=once, backward=2 * once, units=UNITS, weights=2.0 * UNITS * UNITS)

    def loss(self, reads: list[str]) -> str:
        """Add the scores of all words, and the loss."""
        tokens = self.samples * TOKENS
        once = self._product(tokens, UNITS, VOCABULARY)
        words = self._add(
            "words", reads, forward=once, backward=2 * once, units=VOCABULARY, weights=float((UNITS + 1) * VOCABULARY)
        )
        softmax = self.roofline.time(0.0, 8.0 * tokens * VOCABULARY, float(tokens * VOCABULARY))
        return self._add("softmax", [words], forward=softmax, backward=softmax, units=VOCABULARY, weights=0.0)
