"""Machines: files that describe them, what is refused in such files, and the built-in ones."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import distconv as dc
from distconv.perfmodel.machine.links import RankGroup
from distconv.perfmodel.machine.machine import Compute, Link, Machine, Overlap, Roofline, built_in
from distconv.perfmodel.machine.step_mode import MODES, StepMode

GOOD = """
name: box
ranks_per_node: 4
memory: 16 GiB
links:
  node: {latency: 1.5 us, bandwidth: 75 GB/s}
  network: {latency: 2us, bandwidth: 12.5 GB/s}
overlap: {halo: true, allreduce: false}
compute:
- busy: 1
  roofline: {flops: 15.7 TFLOP/s, bandwidth: 900 GB/s, kernel: 10 us, small: 1000 elements}
- busy: 4
  roofline: {flops: 10 TFLOP/s, bandwidth: 300 GB/s, kernel: 10 us}
  table_s: {conv 3x3: 0.0032, other: 1.0e-5}
"""


def load(folder, text):
    path = folder / "box.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Machine.load(path)


def assert_rejected(folder, text, *parts):
    with pytest.raises(dc.MachineError) as raised:
        load(folder, text)
    message = str(raised.value)
    assert isinstance(raised.value, ValueError) and isinstance(raised.value, dc.DistconvError)
    assert "\n" not in message and len(message) < 600 and "box" in message
    for part in parts:
        assert part in message, message


KINDS = """
kinds:
  old: {memory: 12 GB, roofline: {flops: 12.1 TFLOP/s, bandwidth: 547 GB/s, kernel: 10 us}}
  new: {memory: 16 GB, roofline: {flops: 15.7 TFLOP/s, bandwidth: 900 GB/s, kernel: 5 us, small: 100 elements}}
"""


def test_a_kind_of_device_takes_the_place_of_the_machines_own(tmp_path):
    found = load(tmp_path, GOOD + KINDS)
    old = found.of_kind("old")
    assert old.memory_bytes == 12e9 and old.compute == (Compute(1, Roofline(12.1e12, 547e9, 10e-6)),)
    assert (old.node, old.network, old.ranks_per_node) == (found.node, found.network, 4)
    found.save(tmp_path / "again.yaml")
    assert Machine.load(tmp_path / "again.yaml") == found
    with pytest.raises(dc.MachineError, match="there is no kind of device 'odd'; there are old, new"):
        found.of_kind("odd")
    with pytest.raises(dc.MachineError, match="all of its devices are of one kind"):
        load(tmp_path, GOOD).of_kind("old")


def test_kinds_that_are_none_are_refused(tmp_path):
    assert_rejected(tmp_path, GOOD + "kinds: [old]", "kinds: found a list, expected a mapping")
    assert_rejected(
        tmp_path, GOOD + "kinds: {old: 3}", "kinds.old: found 3, expected a mapping with the keys memory, roofline"
    )
    assert_rejected(tmp_path, GOOD + "kinds: {old: {memory: 2 GB}}", "kinds.old.roofline: found nothing")


def test_a_machine_has_times_for_each_mode_of_steps(tmp_path):
    machine, captured = load(tmp_path, GOOD + KINDS), StepMode("channels_last", captured=True)
    entries = tuple(replace(entry, table={"conv": 0.5 * entry.busy}) for entry in machine.compute)
    machine = machine.with_mode(captured, entries)
    machine.save(tmp_path / "saved.yaml")
    assert Machine.load(tmp_path / "saved.yaml") == machine
    assert machine.in_mode(captured) == replace(machine, compute=entries, modes={})
    assert machine.in_mode(StepMode()) is machine
    assert machine.with_mode(StepMode(), entries[:1]) == replace(machine, compute=entries[:1])
    for without in (machine.by_roofline(), machine.at_work(1), machine.of_kind("old")):
        assert not without.modes
    words = "steps that are contiguous, captured", "contiguous, eager; channels_last, captured", "profile --captured"
    with pytest.raises(dc.MachineError, match=".*".join(words)):
        machine.in_mode(StepMode(captured=True))
    with pytest.raises(dc.MachineError, match=r"'captured' is not a mode of steps\. Use one of channels_last, eager; "):
        replace(machine, modes={"captured": entries})
    with pytest.raises(dc.MachineError, match=r"busy=\[4\]"):
        machine.with_mode(MODES[1], entries[1:])


def test_a_file_is_read_with_its_units(tmp_path):
    found = load(tmp_path, GOOD)
    slow = Roofline(10e12, 300e9, 10e-6)
    assert found == Machine(
        name="box",
        ranks_per_node=4,
        memory_bytes=16 * 2**30,
        node=Link(1.5e-6, 75e9),
        network=Link(2e-6, 12.5e9),
        overlap=Overlap(halo=True, allreduce=False),
        compute=(
            Compute(1, Roofline(15.7e12, 900e9, 10e-6, small=1000.0)),
            Compute(4, slow, {"conv 3x3": 0.0032, "other": 1e-5}),
        ),
    )


# -- what is refused --------------------------------------------------------------------------------------------------

WRONG_VALUES = [
    ("bandwidth: 12.5 GB/s", "bandwidth: 16 GHz", "links.network.bandwidth", "'16 GHz'", "'12.5 GB/s'"),
    ("bandwidth: 12.5 GB/s", "bandwidth: 12 Gb/s", "links.network.bandwidth", "'12 Gb/s'", "GB/s"),
    ("bandwidth: 12.5 GB/s", "bandwidth: 12.5", "links.network.bandwidth", "found 12.5,", "a bandwidth"),
    ("bandwidth: 12.5 GB/s", "bandwidth: 12.5 GB", "links.network.bandwidth", "'12.5 GB'", "GB/s"),
    ("bandwidth: 12.5 GB/s", "bandwidth: -1 GB/s", "links.network.bandwidth", "'-1 GB/s'", "a bandwidth"),
    ("bandwidth: 12.5 GB/s", "bandwidth: 0 GB/s", "links.network.bandwidth", "'0 GB/s'", "a bandwidth"),
    ("bandwidth: 12.5 GB/s", "bandwidth: NaN GB/s", "links.network.bandwidth", "'NaN GB/s'", "a bandwidth"),
    ("bandwidth: 12.5 GB/s", "bandwidth: 1e400 GB/s", "links.network.bandwidth", "'1e400 GB/s'", "a bandwidth"),
    ("bandwidth: 12.5 GB/s", "bandwidth: 1e999999999 GB/s", "links.network.bandwidth", "a bandwidth"),
    ("bandwidth: 12.5 GB/s", "bandwidth: 1e-999999999 GB/s", "links.network.bandwidth", "a bandwidth"),
    ("latency: 1.5 us", "latency: 1.5 uS", "links.node.latency", "'1.5 uS'", "'1.5 us'", "s, ms, us, ns"),
    ("memory: 16 GiB", "memory: 16 Gib", "memory", "'16 Gib'", "a memory size"),
    ("flops: 15.7 TFLOP/s", "flops: 15.7 TFLOPS", "compute[0].roofline.flops", "'15.7 TFLOPS'", "TFLOP/s"),
    ("kernel: 10 us", "kernel: 10", "compute[0].roofline.kernel", "found 10,", "a time"),
    ("small: 1000 elements", "small: 1000", "compute[0].roofline.small", "found 1000,", "elements"),
    ("ranks_per_node: 4", "ranks_per_node: 4.0", "ranks_per_node", "found 4.0", "whole number"),
    ("halo: true", "halo: 1", "overlap.halo", "found 1,", "true or false"),
    ("name: box", "name: ' '", "name", "text"),
    ("other: 1.0e-5", "other: 0", "compute[1].table_s.other", "found 0", "a positive number of seconds"),
    ("other: 1.0e-5", "other: .nan", "compute[1].table_s.other", "found nan", "a positive number of seconds"),
    ("other: 1.0e-5", f"other: {10**400}", "compute[1].table_s.other", "found 1000", "a positive number of seconds"),
]


@pytest.mark.parametrize(
    ("good", "bad", *[f"part{i}" for i in range(4)]), [(*w, *("",) * (6 - len(w))) for w in WRONG_VALUES]
)
def test_a_wrong_value_is_named_with_its_key_and_what_is_expected(tmp_path, good, bad, part0, part1, part2, part3):
    assert good in GOOD
    assert_rejected(tmp_path, GOOD.replace(good, bad, 1), part0, part1, part2, part3)


WRONG_SHAPES = [
    ("  node: {latency: 1.5 us, bandwidth: 75 GB/s}\n", "", "links.node: found nothing", "node, network"),
    ("latency: 1.5 us, ", "", "links.node.latency: found nothing", "latency, bandwidth"),
    ("latency: 1.5 us", "latency: 1.5 us, loss: 3", "links.node.loss: found an unknown key", "latency, bandwidth"),
    ("kernel: 10 us, ", "kernal: 10 us, ", "compute[0].roofline.kernal: found an unknown key", "perhaps small"),
    ("memory: 16 GiB\n", "", "memory: found nothing", "name, ranks_per_node, memory"),
    ("name: box\n", "name: box\nname: box\n", "line 3: key 'name' occurs twice"),
    ("- busy: 1", "-", "compute[0].busy: found nothing", "perhaps table_s"),
    ("- busy: 4", "- busy: 1", "busy=[1, 1]", "increasing"),
    ("- busy: 1", "- busy: 2", "busy=[2, 4]", "expected 1 and then"),
    ("- busy: 4", "- busy: 8", "busy=[1, 8]", "ranks_per_node=4"),
]


@pytest.mark.parametrize(("good", "bad", "part", "other"), [(*w, *("",) * (4 - len(w))) for w in WRONG_SHAPES])
def test_missing_unknown_and_double_keys_are_named_with_their_full_path(tmp_path, good, bad, part, other):
    assert good in GOOD
    assert_rejected(tmp_path, GOOD.replace(good, bad, 1), part, other)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    assert_rejected(tmp_path, b"PK\x03\x04\x00\x00", "cannot be read as YAML")
    with pytest.raises(dc.MachineError, match="cannot be read: No such file"):
        Machine.load(tmp_path / "none.yaml")


def test_an_unknown_name_lists_those_that_exist():
    with pytest.raises(
        dc.MachineError, match=r"'lasen': no built-in machine has this name.*h200-node, lassen, localhost, v100-pcie"
    ):
        Machine.load("lasen")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_value_that_could_not_be_loaded_is_not_saved(tmp_path, value):
    with pytest.raises(dc.MachineError, match="positive"):
        replace(Machine.load("lassen"), memory_bytes=value).save(tmp_path / "box.yaml")
    assert not (tmp_path / "box.yaml").exists()


def test_numbers_of_numpy_are_saved_like_those_of_python(tmp_path):
    compute = (Compute(1, Roofline(1.0, 2.0, 3.0), {"a": np.float64(0.1)}),)
    machine = replace(Machine.load("lassen"), memory_bytes=np.float64(3e9), compute=compute)
    machine.save(tmp_path / "box.yaml")
    assert Machine.load(tmp_path / "box.yaml") == machine


def test_a_machine_with_a_wrong_type_is_not_saved(tmp_path):
    with pytest.raises(dc.MachineError, match="machine lassen cannot be written: Expected `bool`"):
        replace(Machine.load("lassen"), overlap=Overlap(1, True)).save(tmp_path / "box.yaml")


# -- saving -----------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_as_it_was(tmp_path):
    one = Machine(
        name="a: b # c",
        ranks_per_node=3,
        memory_bytes=1e9 / 3,
        node=Link(1e-7 / 3, 2e9),
        network=Link(2.5e-6, 1e30, step_s=3e-5),
        overlap=Overlap(False, True),
        compute=(
            Compute(1, Roofline(1e13, 2e11, 3e-6, small=1e3, exchange_s=2e-5, gradient_s=4e-6, unfilled=0.3)),
            Compute(3, Roofline(1e-30, 2e11, 1e30), {"\N{GREEK SMALL LETTER ALPHA}: - #": 1e-4}),
        ),
        on_chip_bytes=4.3e7,
    )
    one.save(tmp_path / "saved.yaml")
    assert Machine.load(tmp_path / "saved.yaml") == one


@pytest.mark.parametrize("name", built_in())
def test_a_built_in_machine_survives_being_saved(tmp_path, name):
    machine = Machine.load(name)
    machine.save(tmp_path / "copy.yaml")
    assert Machine.load(tmp_path / "copy.yaml") == machine and machine.name == name


# -- the built-in ones ------------------------------------------------------------------------------------------------


def test_the_built_in_machines_are_those_that_are_documented():
    assert built_in() == ["h200-node", "lassen", "localhost", "v100-pcie", "vcu118", "vcu129"]


def test_a_small_result_fills_only_its_share_of_the_device():
    roofline = Roofline(flops_per_s=100.0, bytes_per_s=10.0, kernel_s=1.0, small=50.0)
    assert roofline.time(1000.0, 0.0, 50.0) == roofline.time(1000.0, 0.0, 500.0) == 11.0
    # A tenth of the device, at 0.1 ** (3/4) of its rate.
    assert math.isclose(roofline.time(1000.0, 0.0, 5.0), 1 + 10 * 10**0.75)
    assert math.isclose(roofline.time(0.0, 100.0, 5.0), 1 + 10 * 10**0.75)
    assert roofline.time(0.0, 1000.0, 500.0) == 101.0
    assert Roofline(100.0, 10.0, 1.0).time(1000.0, 0.0, 1.0) == 11.0


def test_a_machine_with_other_ranks_at_work_computes_as_they_leave_it():
    machine = Machine.load("localhost")
    busy = machine.at_work(2)
    assert busy.computing(1).roofline == busy.computing(2).roofline == machine.computing(2).roofline
    assert machine.at_work(100).computing(1).roofline == machine.computing(8).roofline


def test_ranks_lie_on_as_many_nodes_as_they_need_and_collectives_have_a_latency_of_their_own():
    assert [RankGroup(ranks, 4).nodes for ranks in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    assert Link(2.0, 10.0).collective_s == 2.0 and Link(2.0, 10.0, step_s=7.0).collective_s == 7.0
    assert Link(2.0, 10.0, step_s=7.0).send(50) == 7.0  # a message's own latency, and 5 s on the way
