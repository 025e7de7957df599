"""A layer profile of blocks of layers: what lies between the places where a network may be cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from distconv.perfmodel.profiles.layer_profile import Layer, Profile


@dataclass(frozen=True)
class Blocks(Profile):
    """Layers of another profile joined: each counts all outputs of its layers, a cut what crosses it there."""

    crossing: tuple[float, ...] = ()

    @property
    def crossing_bytes(self) -> tuple[float, ...]:
        """Bytes that a cut before each block carries, and 0 for the one behind the last."""
        return self.crossing


def joined(profile: Profile, cuts: Iterable[str]) -> Profile:
    """``profile`` with its layers joined into blocks that begin at ``cuts``: those named so, or inside of what is.

    The first block has what comes before. A name that no layer has, such as a view's, begins none.

    >>> layers = [Layer(name, 1.0, 2.0, 8, 4) for name in ("a", "b.0", "b.1", "c")]
    >>> [(block.name, block.time_s) for block in joined(Profile(layers), ["b"]).layers]
    [('a', 3.0), ('b', 9.0)]
    """
    names = [layer.name for layer in profile.layers]
    starts = {0: names[0]}
    for cut in cuts:
        inside = (i for i, name in enumerate(names) if name == cut or name.startswith((f"{cut}.", f"{cut}#")))
        first = next(inside, 0)
        if first:
            starts[first] = cut
    edges = [*sorted(starts), len(names)]
    crossing = profile.crossing_bytes
    blocks = [_block(starts[first], profile.layers[first:end]) for first, end in pairwise(edges)]
    return Blocks(blocks, None, tuple(crossing[edge] for edge in edges))


def _block(name: str, layers: Iterable[Layer]) -> Layer:
    figures = [(each.forward_s, each.backward_s, each.activation_bytes, each.parameter_bytes) for each in layers]
    return Layer(name, *map(sum, zip(*figures, strict=True)))
