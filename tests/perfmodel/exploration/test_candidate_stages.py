"""Costs of stages: time, memory and overheads compared with sums by hand, and their partition."""

from __future__ import annotations

import pytest

from distconv.perfmodel.exploration.candidate_stages import ExplorationContext, Overheads, round_to_layers
from distconv.perfmodel.exploration.explore import explore
from distconv.perfmodel.machine.links import RankGroup
from distconv.perfmodel.stages.devices import Device
from tests.perfmodel.exploration.equal_layers import equal_layers, machine_of


def test_cuts_beside_positions_leave_each_stage_a_layer():
    assert round_to_layers([1.4, 1.6, 3.7], 5) == [1, 2, 4]
    assert round_to_layers([0.2, 0.3], 3) == [1, 2]
    assert round_to_layers([4.9, 4.95], 5) == [3, 4]


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
