"""Sites and kernel maps are computed once, and shared."""

from __future__ import annotations

from distconv.layers.sparse import SparseConv, SparseMaxPool
from tests.layers.sparse.clouds import random_cloud, rng_of


def cloud():
    return random_cloud(rng_of("manager"), 3, 2, sites=40)


def counts(x):
    return x.coordinate_manager.misses, x.coordinate_manager.hits


def test_layers_with_the_same_kernel_share_a_map():
    x = cloud()
    y = SparseConv(2, 2, 3).double()(SparseConv(2, 2, 3).double()(x))
    assert counts(x) == (1, 1) and y.coordinate_manager is x.coordinate_manager
    SparseConv(2, 2, 3, dilation=2).double()(y)
    SparseConv(2, 2, 2).double()(y)
    assert counts(x) == (3, 1)


def test_backward_and_the_transposed_convolution_use_the_map_of_the_way_down():
    x = cloud()
    down = SparseConv(2, 2, 2, 2).double()(x)
    up = SparseConv(2, 2, 2, 2, transposed=True).double()(down)
    assert counts(x) == (1, 1) and up.sites is x.sites
    up.features.sum().backward()
    assert counts(x) == (1, 1)


def test_a_transposed_convolution_may_go_back_several_levels_at_once():
    x = cloud()
    deep = SparseMaxPool(2)(SparseMaxPool(2)(x))
    assert deep.stride == 4
    assert SparseConv(2, 2, 4, 4, transposed=True).double()(deep).sites is x.sites
    assert SparseConv(2, 2, 2, 2, transposed=True).double()(deep).sites is deep.sites.source


def test_paths_that_part_and_meet_have_the_same_sites():
    x = cloud()
    left, right = SparseConv(2, 3, 3, 2).double()(x), SparseConv(2, 3, 1, 2).double()(x)
    assert left.sites is right.sites
    assert (left + right).sites is left.sites


def test_a_wider_set_that_is_not_wider_is_the_same_set():
    x = cloud()
    assert SparseConv(2, 2, 1, submanifold=False).double()(x).sites is x.sites


def test_bytes_are_those_of_the_maps():
    x = cloud()
    assert x.coordinate_manager.bytes == 0
    SparseMaxPool(2)(x)
    # Each site lies in one window: a row of the input and one of the output.
    assert x.coordinate_manager.bytes == 2 * 8 * len(x.coords)


def test_the_maps_live_as_long_as_the_tensors():
    import gc
    import weakref

    x = cloud()
    y = SparseConv(2, 2, 3).double()(x).detach()
    manager = weakref.ref(x.coordinate_manager)
    del x
    gc.collect()
    assert manager() is y.coordinate_manager
    del y
    gc.collect()
    assert manager() is None
