"""Layer profiles: both formats, what is refused in them, and the linear order of a graph."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

import distconv as dc
from distconv.perfmodel.profiles.layer_profile import Layer, Profile, ProfileError

TEXT = """\
node3 -- ReLU(inplace) -- forward_compute_time=1.000, backward_compute_time=2.000, activation_size=8.000, \
parameter_size=0.000
node1 -- Input -- forward_compute_time=17.972, backward_compute_time=0.000, activation_size=77.0, parameter_size=0.0
node10 -- Add -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=8.0, parameter_size=0.0
node2 -- Conv2d(3, 64, kernel_size=(3, 3)) -- forward_compute_time=22.307, backward_compute_time=24.613, \
activation_size=[16.0; 4.0], parameter_size=7168.000 -- stage_id=1
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node10
\tnode2 -- node10
"""


def layer(name, activation_bytes=1.0):
    return Layer(name, 0.5, 1.0, activation_bytes, 4.0)


def load(folder, text):
    path = folder / "net.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Profile.load(path)


def assert_rejected(folder, text, *parts):
    with pytest.raises(ProfileError) as raised:
        load(folder, text)
    message = str(raised.value)
    assert isinstance(raised.value, ValueError) and isinstance(raised.value, dc.DistconvError)
    assert "\n" not in message and len(message) < 500 and "net.txt" in message
    for part in parts:
        assert part in message, message


def test_pipedreams_text_is_read_in_seconds_and_bytes_without_its_input_node(tmp_path):
    found = load(tmp_path, TEXT)
    assert [each.name for each in found.layers] == ["node2", "node3", "node10"]
    assert found.layers[0] == Layer("node2", 22.307 / 1e3, 24.613 / 1e3, 20.0, 7168.0)
    assert found.edges == (("node2", "node3"), ("node3", "node10"), ("node2", "node10"))


def test_a_saved_profile_is_loaded_as_it_was(tmp_path):
    profile = load(tmp_path, TEXT)
    profile.save(tmp_path / "ours.json")
    assert Profile.load(tmp_path / "ours.json") == profile


def test_without_edges_each_layer_reads_the_one_before():
    assert Profile([layer("a"), layer("b"), layer("c")]).edges == (("a", "b"), ("b", "c"))


def test_the_order_has_no_layer_before_what_it_reads():
    names = [f"layer {index}" for index in range(30)]
    random.seed(3)
    edges = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if random.random() < 0.1]
    shuffled = random.sample(names, len(names))
    place = {each.name: i for i, each in enumerate(Profile([layer(name) for name in shuffled], edges).layers)}
    assert sorted(place) == sorted(names)
    assert all(place[a] < place[b] for a, b in edges)


def test_a_cut_carries_each_output_that_is_read_behind_it_once():
    layers = [layer(name, size) for name, size in zip("abcd", (1.0, 10.0, 100.0, 1000.0), strict=True)]
    residual = Profile(layers, [("a", "b"), ("b", "c"), ("a", "d"), ("c", "d"), ("a", "c")])
    assert residual.crossing_bytes == (0.0, 1.0, 11.0, 101.0, 0.0)


def test_what_nobody_reads_is_carried_to_the_end():
    layers = [layer(name, size) for name, size in zip("abc", (1.0, 10.0, 100.0), strict=True)]
    assert Profile(layers, [("a", "b"), ("a", "c")]).crossing_bytes == (0.0, 1.0, 11.0, 0.0)


@pytest.mark.parametrize(
    "wrong, parts",
    [
        (TEXT.replace("forward_compute_time=1.000", "forward_compute_time=fast"), ("line 1:", "'fast'", "a number")),
        (TEXT.replace("forward_compute_time=1.000", "forward_compute_time=-1"), ("line 1:", "forward_s", "-0.001")),
        (TEXT.replace("parameter_size=7168.000", "parameter_size=nan"), ("line 4:", "parameter_bytes", "nan")),
        (TEXT.replace("=[16.0; 4.0]", "=inf"), ("line 4:", "activation_bytes", "inf")),
        (TEXT.replace("=[16.0; 4.0]", "=[1e308; 1e308]"), ("line 4:", "activation_bytes", "inf")),
        (TEXT.replace("=[16.0; 4.0]", "=[16.0"), ("line 4:", "'[16.0'", "a number")),
        (TEXT.replace("=[16.0; 4.0]", "=16.0]"), ("line 4:", "'16.0]'", "a number")),
        (TEXT.replace("=[16.0; 4.0]", "=16.0; 4.0"), ("line 4:", "'16.0; 4.0'", "a number")),
        (TEXT.replace("=8.000", "=1e308").replace("size=8.0,", "size=1e308,"), ("activation_bytes", "too large")),
        (TEXT.replace("activation_size=8.000, ", ""), ("line 1:", "activation_size=NUMBER")),
        (TEXT.replace("\tnode2 -- node3", "\tnode2 node3"), ("line 6:", "'node2 node3'", "NAME -- NAME")),
        (TEXT.replace("\tnode2 -- node3", "\tnode2 -- node33"), ("no layer 'node33'",)),
        (TEXT + "\tnode10 -- node2\n", ("cycle", "'node2' -> ")),
        (TEXT + "\tnode3 -- node3\n", ("cycle", "'node3'")),
        (TEXT + "\tnode2 -- node3\n", ("edge ('node2', 'node3') occurs twice",)),
        (TEXT.replace("node10 -- Add", "node3 -- Add"), ("layer 'node3' occurs twice",)),
        (TEXT.replace("\tnode3 -- node10\n\tnode2 -- node10\n", ""), ("2 unconnected parts", "'node10'", "cut off?")),
        (TEXT[: TEXT.index("\t")], ("4 unconnected parts", "cut off?")),
        ("", ("no layer",)),
    ],
)
def test_malformed_text_is_refused_with_its_line(tmp_path, wrong, parts):
    assert_rejected(tmp_path, wrong, *parts)


ROW = {"name": "a", "forward_s": 1.0, "backward_s": 2.0, "activation_bytes": 8, "parameter_bytes": 4}


@pytest.mark.parametrize(
    "wrong, parts",
    [
        ({"layers": [ROW]}, ("edges: found nothing", "the keys layers, edges")),
        ({"layers": [{**ROW, "time": 1}], "edges": []}, ("layers[0]", "time")),
        ({"layers": [{**ROW, "forward_s": "1 ms"}], "edges": []}, ("forward_s", "'1 ms'")),
        ({"layers": [{**ROW, "backward_s": float("nan")}], "edges": []}, ("backward_s", "nan")),
        ({"layers": [{**ROW, "activation_bytes": -1}], "edges": []}, ("activation_bytes", "-1")),
        ({"layers": [{**ROW, "parameter_bytes": True}], "edges": []}, ("parameter_bytes", "True")),
        ({"layers": [{**ROW, "parameter_bytes": 10**400}], "edges": []}, ("parameter_bytes", "10000000000")),
        ({"layers": [{**ROW, "forward_s": 1e308, "backward_s": 1e308}], "edges": []}, ("time_s", "too large")),
        ({"layers": [{**ROW, "name": ""}], "edges": []}, ("name of a layer",)),
        ({"layers": [ROW], "edges": [["a"]]}, ("edges[0]", "two layers")),
        ({"layers": [ROW], "edges": [["a", "b"]]}, ("no layer 'b'",)),
    ],
)
def test_malformed_json_is_refused_with_its_key(tmp_path, wrong, parts):
    assert_rejected(tmp_path, json.dumps(wrong), *parts)


def test_what_is_no_json_is_refused(tmp_path):
    assert_rejected(tmp_path, '{"edges": [], "edges": []}', "key 'edges' occurs twice")


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, int])
def test_numbers_of_any_kind_are_figures_that_can_be_saved(tmp_path, kind):
    profile = Profile([Layer("a", *map(kind, (1, 2, 8, 4)))])
    assert profile.layers == (Layer("a", 1.0, 2.0, 8.0, 4.0),)
    profile.save(tmp_path / "net.json")
    assert Profile.load(tmp_path / "net.json") == profile


def test_nodes_are_in_the_order_of_their_numbers_however_long(tmp_path):
    long = "node" + "9" * 5000
    text = TEXT.replace("node3", long)
    assert [each.name for each in load(tmp_path, text.replace(f"{long} -- node10", f"node10 -- {long}")).layers] == [
        "node2",
        "node10",
        long,
    ]


def test_a_missing_file_and_one_that_cannot_be_written_are_named(tmp_path):
    with pytest.raises(ProfileError, match=r"missing\.json cannot be read: No such file"):
        Profile.load(tmp_path / "missing.json")
    with pytest.raises(ProfileError, match="cannot be written: Is a directory"):
        Profile([layer("a")]).save(tmp_path)


@pytest.mark.parametrize("layers", [None, [1], 3, ("a",)])
def test_layers_that_are_none_are_refused(layers):
    with pytest.raises(ProfileError, match="expected a list of Layer"):
        Profile(layers)
