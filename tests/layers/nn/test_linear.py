"""Linear layers against one process."""

from __future__ import annotations

from torch import nn

import distconv as dc
from tests.distconv.layouts import grid_over, normal, raises_everywhere
from tests.layers.compare import built


def test_a_linear_layer_over_features_of_the_wrong_number_raises_torchs_error(comm):
    x = dc.scatter(normal(3, 6), grid_over(comm, n=comm.size))
    module = built(lambda: nn.Linear(5, 4))
    raises_everywhere(
        comm, dc.ShapeError, r"mat1 and mat2 shapes cannot be multiplied \(3x6 and 5x4\)", lambda: module(x)
    )
