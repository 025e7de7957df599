"""What people write gives on grids what it gives in one process, or is refused by one clear sentence on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distconv.layouts import grid_over
from tests.idioms import (
    accumulation,
    adversarial,
    attention,
    averages,
    calls,
    counts,
    distributions,
    functions,
    gradients,
    graph,
    images,
    layers,
    losses,
    memory,
    names,
    objectives,
    optimizers,
    parameters,
    random,
    recomputation,
    segmentation,
    shapes,
    solvers,
    steps,
    training,
    views,
)
from tests.idioms.table import IDIOMS, Idiom, alone, ending

MODULES = [
    accumulation, adversarial, attention, averages, calls, counts, distributions, functions, gradients, graph,
    images, layers, losses, memory, names, objectives, optimizers, parameters, random, recomputation, segmentation,
    shapes, solvers, steps, training, views,
]  # fmt: skip

GRIDS: dict[int, list[dict[str, int]]] = {
    2: [{"c": 2}, {"h": 2}, {"n": 2}],
    3: [{"c": 3}, {"w": 3}, {"n": 3}],
    4: [{"c": 2, "h": 2}, {"h": 2, "w": 2}, {"n": 2, "c": 2}],
}

CASES = [pytest.param(each, id=each.name, marks=() if each.quick else pytest.mark.slow) for each in IDIOMS]


@pytest.mark.long
@pytest.mark.usefixtures("fallback")
@pytest.mark.ranks(*GRIDS)
@pytest.mark.parametrize("idiom", CASES)
def test_an_idiom_gives_what_it_gives_in_one_process_or_is_refused_clearly(comm: Any, idiom: Idiom) -> None:
    expected = alone(idiom.run)
    endings = {str(axes): ending(idiom.run, grid_over(comm, **axes), expected) for axes in GRIDS[comm.size]}
    assert set(comm.allgather(str(endings))) == {str(endings)}
    refused = {axes: text for axes, text in endings.items() if text.startswith("refused: ")}
    if idiom.refused is None:
        assert not refused
    else:
        assert refused, "it is refused no more: say so in its table"
        assert all(idiom.refused in text for text in refused.values()), refused
    assert not {axes: text for axes, text in endings.items() if text.startswith("wrong: ")}


def test_the_idioms_are_many_and_few_are_refused() -> None:
    named = [each.name for each in IDIOMS]
    assert len(named) == len(set(named)) >= 150
    assert all(any(name.startswith(module.__name__.rpartition(".")[2]) for name in named) for module in MODULES)
    assert sum(each.refused is not None for each in IDIOMS) <= len(named) / 20
