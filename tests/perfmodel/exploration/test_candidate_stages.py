"""What stages cost: time, memory and overheads against sums worked out by hand, and the partition they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distconv.perfmodel.exploration.candidate_stages import ExplorationContext, Overheads, round_to_layers
from distconv.perfmodel.exploration.explore import explore
from distconv.perfmodel.machine.links import Link, RankGroup
from distconv.perfmodel.stages.devices import Device
from tests.perfmodel.exploration.equal_layers import LATENCY, equal_layers, machine_of


def test_cuts_beside_positions_leave_each_stage_a_layer():
    assert round_to_layers([1.4, 1.6, 3.7], 5) == [1, 2, 4]
    assert round_to_layers([0.2, 0.3], 3) == [1, 2]
    assert round_to_layers([4.9, 4.95], 5) == [3, 4]


def test_memory_is_activations_in_flight_and_weights_with_gradients_and_state():
    found = explore(equal_layers(), machine_of(1e12), 4, 16, microbatches=[16], schedules=["1f1b-so"])
    # Two layers each; weights, gradients, momentum; twice 4, 3, 2, 1 micro-batches of a sixteenth.
    assert found.best.memory == tuple(3 * 16.0 + flying * 1.0 for flying in (8, 6, 4, 2))
    assert found.memory == 56.0


def test_stashed_weights_and_mini_batches_under_way_take_memory():
    pipedream = explore(equal_layers(), machine_of(1e12), 4, 16, microbatches=[1], schedules=["pipedream"])
    # Two layers each; weights, gradients, momentum, and stashed ones; 4, 3, 2, 1 mini-batches of 16 bytes.
    assert pipedream.best.memory == tuple((3 + flying - 1) * 16.0 + flying * 16.0 for flying in (4, 3, 2, 1))
    stale = explore(equal_layers(), machine_of(1e12), 4, 16, microbatches=[1], schedules=["stale"])
    assert stale.best.memory == tuple(3 * 16.0 + flying * 16.0 for flying in (7, 5, 3, 1))


def test_a_transfer_between_nodes_takes_their_link():
    profile, machine = equal_layers(activation=1e9), machine_of(1e10, per_node=2)
    slow = replace(machine, network=Link(LATENCY, 1e9))
    arguments = {"microbatches": [8], "schedules": ["1f1b-sno"]}
    one_node = explore(profile, replace(machine, ranks_per_node=4), 4, 16, **arguments)
    assert explore(profile, slow, 4, 16, **arguments).time > one_node.time
    two = explore(profile, slow, 2, 16, **arguments)
    assert two.time == explore(profile, machine, 2, 16, **arguments).time


def test_an_allreduce_hides_behind_the_last_backward_pass_where_the_machine_overlaps():
    hidden = explore(equal_layers(parameters=1e8), machine_of(1e9, overlap=True), 4, 16, microbatches=[4])
    assert hidden.schedule == "dp" and hidden.time == pytest.approx(6.0)


def test_overheads_of_passes_messages_and_updates_count_once_each():
    profile, machine = equal_layers(activation=8e8, parameters=1.0), machine_of(1e9)
    arguments = {"microbatches": [4], "schedules": ["gpipe"]}
    plain = explore(profile, machine, 2, 16, **arguments)
    passes = explore(profile, machine, 2, 16, **arguments, overheads=Overheads(pass_s=0.5))
    # GPipe: as many passes in a row as micro-batches, and once more for the second stage; forward and backward.
    assert passes.time == pytest.approx(plain.time + 0.5 * 2 * (4 + 1))
    messages = explore(profile, machine, 2, 16, **arguments, overheads=Overheads(message_s=0.5))
    assert messages.time == pytest.approx(passes.time)
    updates = explore(profile, machine, 2, 16, **arguments, overheads=Overheads(update_s_per_byte=0.25))
    assert updates.time == pytest.approx(plain.time + 0.25 * 4)
    joined = explore(profile, machine, 2, 16, **arguments, overheads=Overheads(join_s=0.25))
    assert joined.time == plain.time  # there are no replicas
    blocking = explore(profile, machine, 2, 16, **arguments, overheads=Overheads(blocking=True))
    sent = machine.send(8e8 / 4, across=False)
    # What was on its way while stages computed now makes their passes longer: once in each direction.
    assert blocking.time == pytest.approx(plain.time + 2 * (4 - 1) * sent)


@pytest.mark.parametrize(("replicas", "share"), [(1, 0.0), (2, 0.5), (4, 1.0)])
def test_replicas_of_a_stage_are_joined_for_its_share_of_the_layers(replicas, share):
    setting = ExplorationContext(equal_layers(8), machine_of(1e12), [Device("any", 4)], 1)
    plain, joined = (
        replace(setting, overheads=each).pipeline_candidate("gpipe", replicas, 4)
        for each in (NO_OVERHEADS, Overheads(join_s=0.25))
    )
    cuts = {1: [2, 4, 6], 2: [4], 4: []}[replicas]
    assert joined.time(cuts) == pytest.approx(plain.time(cuts) + 0.25 * share)


def stages_of(layers, devices, replicas=1):
    setting = ExplorationContext(equal_layers(layers), machine_of(1e12), devices, 1)
    return setting.pipeline_candidate("gpipe", replicas, 4)


def test_there_are_at_most_as_many_stages_as_layers():
    assert stages_of(3, [Device("gpu", 4, None)]) is None
    found = stages_of(3, [Device("gpu", 6, None)], replicas=2)
    assert found is not None and found.count == 3


def test_a_stage_has_the_room_of_the_smallest_device_that_has_it():
    # Replica r has devices 2 r and 2 r + 1: the first stage is on large ones, then on small ones.
    devices = [Device("large", 3, None, 9e9), Device("small", 1, None, 1e9)]
    found = stages_of(4, devices, replicas=2)
    assert found.memory_limits == [9e9, 1e9]
    assert found.partition([2]).assignment == ({"large": 2}, {"large": 1, "small": 1})


def test_a_partition_has_the_layers_between_whole_cuts_and_the_time_of_its_positions():
    found = stages_of(4, [Device("gpu", 3, None)])
    partition = found.partition([1.4, 3.0])
    assert partition.cuts == (1, 3) and partition.positions == (1.4, 3.0)
    assert partition.stages == (("l0",), ("l1", "l2"), ("l3",))
    assert partition.time == found.time([1.4, 3.0])


def test_part_of_a_layer_takes_its_part_of_the_time_and_memory():
    found = stages_of(4, [Device("gpu", 2, None)])
    forward, backward, _ = found.costs([1.5], found.context.kinds)
    assert forward == pytest.approx([1.5, 2.5]) and backward == pytest.approx([3.0, 5.0])
    # GPipe holds the outputs of all four micro-batches, beside weights, gradients and momentum.
    assert found.memory([1.5]) == pytest.approx([8 * 1.5 * (4 + 3), 8 * 2.5 * (4 + 3)])


NO_OVERHEADS = Overheads()


def three_stages(overheads=NO_OVERHEADS, replicas=1, parameters=8.0):
    setting = ExplorationContext(
        equal_layers(6, parameters=parameters), machine_of(1e9), [Device("gpu", 3 * replicas, None)], 1,
        overheads=overheads,
    )  # fmt: skip
    return setting.pipeline_candidate("gpipe", replicas, 4)


def test_a_message_occupies_who_takes_it_forward_the_next_stage_and_backward_the_one_before():
    given = [1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [0.25, 0.5]
    of = three_stages(Overheads(pass_s=100.0, message_s=1000.0, blocking=True))
    assert of._with_overheads(*given) == ([1101, 2102.25, 1103.5], [1110.25, 2120.5, 1130], [0, 0])
    free = three_stages(Overheads(pass_s=100.0, message_s=1000.0))
    assert free._with_overheads(*given) == ([1101, 2102, 1103], [1110, 2120, 1130], [0.25, 0.5])


def test_an_allreduce_hides_behind_the_backward_passes_of_the_stages_before_it():
    # Two replicas sum 2e9 bytes of each stage in as many seconds; only the last stage has passes of others behind it.
    stages = three_stages(replicas=2, parameters=1e9)
    summed = stages.context.machine.allreduce(RankGroup(2, 2), 2e9)
    assert stages._exposed_allreduce([2, 4], [0.1, 0.1, 0.1], [0.0, 0.0]) == pytest.approx(summed)
    # The first stage has nothing to sum: behind the second there is 0.5 + 0.25 of the first, which is what is hidden.
    assert stages._exposed_allreduce([0, 2], [0.5, 0.1, 0.1], [0.25, 0.0]) == pytest.approx(
        max(summed - 0.75, stages.context.machine.allreduce(RankGroup(2, 2), 4e9) - 0.85)
    )
