"""Blocks of layers: their times, and what crosses between them."""

from __future__ import annotations

from distconv.perfmodel.profiles.joined_layers import join_layers
from distconv.perfmodel.profiles.layer_profile import Layer, Profile

NAMES = ("a", "b.0", "b.1", "c", "d")
LAYERS = [Layer(name, 1.0 + i, 2.0 + i, 8.0 * (i + 1), 4.0) for i, name in enumerate(NAMES)]
SKIP = [("a", "b.0"), ("b.0", "b.1"), ("b.1", "c"), ("c", "d"), ("a", "d")]
"""The first layer's output is read once more by the last one."""


def test_blocks_begin_at_cuts_and_have_the_sums_of_their_layers():
    found = join_layers(Profile(LAYERS), ["b", "d"]).layers
    assert [block.name for block in found] == ["a", "b", "d"]
    assert [block.time_s for block in found] == [3.0, 5.0 + 7.0 + 9.0, 11.0]
    assert [block.activation_bytes for block in found] == [8.0, 16.0 + 24.0 + 32.0, 40.0]
    assert [block.parameter_bytes for block in found] == [4.0, 12.0, 4.0]


def test_what_crosses_between_blocks_is_what_crossed_between_the_layers():
    profile = Profile(LAYERS, SKIP)
    every = dict(zip(NAMES, profile.crossing_bytes, strict=False))
    found = join_layers(profile, ["b.1", "d"])
    assert found.crossing_bytes == (0.0, every["b.1"], every["d"], 0.0)
    assert every["d"] == 8.0 + 32.0


def test_names_that_are_no_layers_and_the_first_layer_begin_no_block():
    assert [block.name for block in join_layers(Profile(LAYERS), ["a", "flatten", "c"]).layers] == ["a", "c"]
    assert len(join_layers(Profile(LAYERS), []).layers) == 1


def test_a_call_of_a_function_inside_a_module_is_found_by_the_modules_name():
    layers = [Layer("a", 1.0, 1.0, 8, 0), Layer("pool#2", 1.0, 1.0, 8, 0)]
    assert [block.name for block in join_layers(Profile(layers), ["pool"]).layers] == ["a", "pool"]


def test_a_name_that_begins_alike_is_another():
    layers = [Layer(name, 1.0, 1.0, 8, 0) for name in ("a", "block10", "block1.conv", "block1#2")]
    assert [(b.name, b.time_s) for b in join_layers(Profile(layers), ["block1"]).layers] == [
        ("a", 4.0),
        ("block1", 4.0),
    ]
