"""Arguments of sparse layers with windows."""

from __future__ import annotations

import pytest

from distconv.layers.sparse.windows import sizes_per_dim, to_offsets


def test_one_extent_is_that_of_all_dimensions():
    assert sizes_per_dim(3, 2) == sizes_per_dim([3, 3], 2) == (3, 3)


@pytest.mark.parametrize("size", [0, None, (3,), (3, 2.5), (3, -1)])
def test_invalid_sizes_raise(size):
    with pytest.raises(ValueError, match="kernel_size="):
        sizes_per_dim(size, 2)


def test_offsets_may_be_any_sequences():
    assert to_offsets([[0, 1], (2, -3)], 2) == ((0, 1), (2, -3))
