"""The choice among data parallelism and pipelines: what is chosen, what it costs, and what memory forbids."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from distconv.errors import DistconvError
from distconv.perfmodel.cost.assumptions import Settings
from distconv.perfmodel.cost.evaluation import StepModel
from distconv.perfmodel.cost.operation_work import local_call, work
from distconv.perfmodel.exploration.choices import ExplorationError
from distconv.perfmodel.exploration.explore import SYNCHRONOUS, explore
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.machine.machine import Machine, RankGroup
from distconv.perfmodel.profiles.predicted_profile import predicted_profile, scale_profile
from distconv.perfmodel.stages.devices import Device
from distconv.pipeline import schedule, simulate
from tests.perfmodel.exploration.equal_layers import equal_layers, machine_of

PIPELINES = SYNCHRONOUS[1:]


@pytest.mark.parametrize("name", PIPELINES)
def test_the_time_of_a_pipeline_is_the_simulated_one(name):
    profile, machine = equal_layers(activation=1e9), machine_of(1e10)
    found = explore(profile, machine, 4, 16, microbatches=[8], schedules=[name])
    # Two layers on each stage, two samples in a micro-batch.
    sent = machine.send(1e9 / 8, across=False)
    simulated = simulate(schedule(name, 4, 8), 2 / 8, 4 / 8, transfer=sent).makespan
    assert found.time == pytest.approx(simulated, rel=1e-12)


def test_data_parallelism_takes_its_share_of_the_samples_and_one_allreduce():
    machine = machine_of(1e9)
    found = explore(equal_layers(parameters=1e8), machine, 4, 16, schedules=["dp"])
    assert found.time == pytest.approx(8 * 3 / 4 + machine.allreduce(RankGroup(4, 4), 8e8))
    assert found.table[0].replicas == 4 and {choice.microbatches for choice in found.table} == {4, 8, 16}


def test_what_does_not_fit_is_not_chosen_but_listed():
    profile = equal_layers(activation=100.0)
    free = explore(profile, machine_of(1e12), 4, 16, schedules=PIPELINES)
    tight = explore(profile, machine_of(1e12, memory=free.memory - 1), 4, 16, schedules=PIPELINES)
    assert tight.time > free.time and tight.memory < free.memory
    assert any(not choice.fits for choice in tight.table)
    assert [choice.fits for choice in tight.table] == sorted((choice.fits for choice in tight.table), reverse=True)


def test_the_memory_named_where_nothing_fits_is_enough():
    with pytest.raises(ExplorationError, match="no choice fits") as caught:
        explore(equal_layers(), machine_of(1e12, memory=10), 4, 16)
    needed = float(str(caught.value).rsplit("needs ", 1)[1].split()[0])
    assert explore(equal_layers(), machine_of(1e12, memory=needed), 4, 16).memory == needed


def test_a_profile_of_some_samples_counts_for_others_in_proportion():
    machine = machine_of(1e10)
    of_four = scale_profile(equal_layers(activation=1e9), 4 / 16)
    assert of_four.layers[0].parameter_bytes == 8
    whole_batch = explore(equal_layers(activation=1e9), machine, 4, 16)
    assert explore(of_four, machine, 4, 16, samples=4).time == pytest.approx(whole_batch.time)
    made = explore(lambda samples: scale_profile(of_four, samples / 4), machine, 4, 16)
    assert made.time == pytest.approx(whole_batch.time)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch": 0}, "batch=0"),
        ({"batch": 2.5}, "batch=2.5"),
        ({"microbatches": [3]}, "3 micro-batches, expected a divisor of 16"),
        ({"microbatches": []}, "no number of micro-batches"),
        ({"schedules": ["spectrain"]}, r"expected some of dp, 1f1b-sno"),
        ({"schedules": []}, "expected some of"),
        ({"optimizer_slots": -1}, "optimizer_slots=-1"),
        ({"microbatches": [2], "schedules": ["dp"]}, "Data parallelism needs a multiple of 4"),
        ({"devices": 16, "schedules": ["1f1b-so"]}, r"at least 16 layers \(there are 8\)"),
        ({"devices": 0}, "found 0 devices"),
        ({"profile": lambda n: equal_layers(), "devices": [Device("a", 1, [1.0] * 8)]}, "their own times"),
        ({"profile": None}, "found None, expected a Profile or a function"),
        ({"profile": "vgg16"}, "found 'vgg16', expected a Profile or a function"),
        ({"samples": 0}, "samples=0, expected a positive whole number"),
        ({"samples": -3}, "samples=-3, expected a positive whole number"),
        ({"schedules": "1f1b"}, r"schedules=\['1f1b'\], expected some of dp, "),
        ({"microbatches": 3}, "found 3 micro-batches, expected a divisor of 16"),
        ({"memory": 0}, "memory: found 0, expected a positive number of bytes"),
    ],
)
def test_questions_without_an_answer_are_refused(arguments, text):
    known = {"profile": equal_layers(), "machine": machine_of(1e9), "devices": 4, "batch": 16}
    with pytest.raises(DistconvError, match=text) as raised:
        explore(**known | arguments)
    assert isinstance(raised.value, ValueError)


def test_a_machine_may_be_named_and_single_choices_need_no_list():
    profile = equal_layers()
    found = explore(profile, "v100-pcie", 2, 16, microbatches=4, schedules="1f1b-sno")
    assert found == explore(profile, Machine.load("v100-pcie"), 2, 16, microbatches=[4], schedules=["1f1b-sno"])


def images(count):
    """Graphs of four convolutions on images of 64 x 64: large activations, small weights."""
    layers = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(4)]
    return trace(nn.Sequential(*layers), (count, 4, 64, 64))


def test_samples_too_large_for_a_device_are_divided_among_the_ranks_of_a_stage():
    """A stage of one convolution needs its output alone, 65,536 bytes; half of that must do."""
    machine = machine_of(1e9, memory=40_000.0)
    with pytest.raises(ExplorationError, match="no choice fits into 40000 bytes"):
        explore(images, machine, 4, 2)
    found = explore(images, machine, 8, 2, joint=True)
    assert found.best.width > 1
    assert found.memory <= 40_000
    assert set(found.best.plan.layers) == set(images(1).deciding)
    assert "ranks" in str(found.best) and "ranks" in found.explain()


def test_every_choice_of_a_joint_search_uses_all_ranks_and_is_priced_by_its_own_profile():
    machine = machine_of(1e9)
    found = explore(images, machine, 4, 4, joint=True)
    assert {choice.width for choice in found.table} == {1, 2, 4}
    for choice in found.table:
        stages = len(choice.memory)
        assert stages * choice.replicas * choice.width == 4
        if stages == 1 and choice.replicas == 1:
            profile = predicted_profile(images(4 // choice.microbatches), machine, choice.plan, choice.width)
            expected = choice.microbatches * sum(layer.time_s for layer in profile.layers)
            assert choice.time == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["pipedream", "stale"])
@pytest.mark.parametrize("stages", [2, 4])
def test_an_endless_schedule_takes_what_a_mini_batch_takes_longer_in_the_simulation(name, stages):
    machine = machine_of(1e10)
    found = explore(equal_layers(activation=1e9), machine, stages, 16, microbatches=[1, 2], schedules=[name])
    assert found.microbatches == 1 and len(found.table) == 1
    costs = found.best.costs
    spans = [
        simulate(schedule(name, stages, count), costs.forward, costs.backward, transfer=(*costs.transfer, 0.0)).makespan
        for count in (40, 80)
    ]
    assert found.time == pytest.approx((spans[1] - spans[0]) / 40, rel=1e-6)


def measured_machine(graph, machine, ranks, factor):
    """``machine`` with measured times of the layers of ``graph``, ``factor`` times those of its roofline."""
    model = StepModel.cached(graph, machine.at_work(ranks), 1, Settings())
    table = {}
    for op in graph.operations:
        call = local_call(op, model.parts({}))
        for phase in ("forward", "input", "weight"):
            if work(call, phase).kernels:
                table[f"{call.key} {phase}"] = factor * model.costs.compute(call, phase)
    return replace(machine, compute=(replace(machine.computing(ranks), busy=1, table=table),))


def test_an_estimate_by_the_roofline_is_not_ranked_against_measured_times():
    """Smaller micro-batches, which were not measured, would look faster on a machine slower than its roofline."""
    graphs = {size: trace(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), (size, 64)) for size in (1, 2, 4)}
    described = machine_of(1e9)
    machine = measured_machine(graphs[4], described, 2, 100.0)
    found = explore(graphs.__getitem__, machine, 2, 8, microbatches=[2, 4, 8], schedules=["dp"])
    assert found.best.microbatches == 2 and not found.estimated
    assert [choice.estimated for choice in found.table] == [False, True, True]
    assert min(choice.time for choice in found.table[1:]) < found.time
    assert "2 of them have layers that were not measured" in found.explain()
    assert found.explain().count("estimate, not measured") == 1  # the best of them
    alone = explore(graphs.__getitem__, machine, 2, 8, microbatches=[4, 8], schedules=["dp"])
    by_roofline = explore(graphs.__getitem__, described, 2, 8, microbatches=[4, 8], schedules=["dp"])
    assert alone.estimated and alone.time == by_roofline.time
