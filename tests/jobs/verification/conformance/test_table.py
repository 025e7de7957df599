"""Values of inputs: drawn from the given generator alone, and what their names say."""

from __future__ import annotations

import pytest
import torch

from distconv.jobs.verification.conformance.table import VALUES
from tests.jobs.approved import assert_approved, size_of

SIZES = {"n": 3, "c": 4, "h": 5, "w": 6}
SHAPE = (3, 4, 5, 6)


def drawn(kind: str, seed: int) -> torch.Tensor:
    return VALUES[kind](SHAPE, SIZES, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", VALUES)
def test_values_depend_on_the_generator_alone(kind: str) -> None:
    torch.manual_seed(0)
    first = drawn(kind, 1)
    torch.manual_seed(1)
    assert torch.equal(first.nan_to_num(), drawn(kind, 1).nan_to_num())
    assert kind == "negative zero" or not torch.equal(first.nan_to_num(), drawn(kind, 2).nan_to_num())


def test_values_are_as_approved() -> None:
    lines = []
    for kind in VALUES:
        found = drawn(kind, 1).double()
        ends = found.nan_to_num(posinf=0, neginf=0)
        lines.append(
            f"{kind}: {size_of(found.nan_to_num())}, from {ends.min():.4g} to {ends.max():.4g}, {found.isnan().sum()} "
            f"NaN, {found.isinf().sum()} infinite, {len(found.unique())} different"
        )
    assert_approved("conformance/values-of-inputs", "\n".join(lines))
