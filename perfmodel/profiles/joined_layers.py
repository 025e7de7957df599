"""Layer profile of blocks of layers, between the positions where a network may be split.

:func:`.explore` joins a profile at the positions where :func:`distconv.pipeline.split` can split the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from distconv.perfmodel.profiles.layer_profile import Layer, Profile


@dataclass(frozen=True)
class JoinedProfile(Profile):
    """Profile of joined layers.

    A block sums the times and sizes of its layers, so ``activation_bytes`` is what the stage keeps for backward. The
    bytes that cross a split are those of the original profile, and are stored in ``crossing``.

    Attributes
    ----------
    crossing : tuple of float
        Bytes that cross a split before each block, and 0 at the end.
    """

    crossing: tuple[float, ...] = ()

    @property
    def crossing_bytes(self) -> tuple[float, ...]:
        """Bytes that cross a split before each block; the last entry is 0, for the position after all blocks."""
        return self.crossing


def join_layers(profile: Profile, cuts: Iterable[str]) -> Profile:
    """Return a profile whose layers are joined into blocks that begin at some layers.

    Parameters
    ----------
    profile : Profile
    cuts : iterable of str
        Names of layers, or of modules that contain them. A name without a layer, such as that of a view, is ignored.

    Returns
    -------
    JoinedProfile
        The first block begins at the first layer.

    Examples
    --------
    >>> layers = [Layer(name, 1.0, 2.0, 8, 4) for name in ("a", "b.0", "b.1", "c")]
    >>> [(block.name, block.time_s) for block in join_layers(Profile(layers), ["b"]).layers]
    [('a', 3.0), ('b', 9.0)]
    """
    names = [layer.name for layer in profile.layers]
    # The first layer of a module begins its block: "b.0" for "b"; "b#2" is the second call of "b".
    starts = {0: names[0]}
    for cut in cuts:
        inside = (i for i, name in enumerate(names) if name == cut or name.startswith((f"{cut}.", f"{cut}#")))
        first = next(inside, 0)
        if first:
            starts[first] = cut
    edges = [*sorted(starts), len(names)]
    blocks = []
    for first, end in pairwise(edges):
        figures = [
            (layer.forward_s, layer.backward_s, layer.activation_bytes, layer.parameter_bytes)
            for layer in profile.layers[first:end]
        ]
        blocks.append(Layer(starts[first], *map(sum, zip(*figures, strict=True))))
    # Of the original profile: the summed outputs of a block are more than what leaves it.
    crossing = profile.crossing_bytes
    return JoinedProfile(blocks, None, tuple(crossing[edge] for edge in edges))
