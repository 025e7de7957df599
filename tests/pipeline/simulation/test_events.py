"""The simulator against longest paths, and each thing that it models by itself."""

from __future__ import annotations

import random
from dataclasses import replace
from graphlib import TopologicalSorter

import pytest

from distconv.pipeline import FAMILIES, ScheduleError, schedule, simulate

SEQUENTIAL = [name for name in FAMILIES if name != "fbp-as"]


def longest_path(found, forward, backward, weight, transfer, update):
    """Time of the last event, from a graph: passes are edges from their begin to their end."""
    graph = {}

    def edge(source, target, time):
        graph.setdefault(target, {})[source] = time

    count = len(found.stages)
    split = any(action.kind == "W" for action in found)
    for stage, actions in enumerate(found.stages):
        cost = {
            "F": forward[stage] / found.chunks,
            "B": (backward[stage] if split else backward[stage] + weight[stage]) / found.chunks,
            "W": weight[stage] / found.chunks,
            "update": update[stage],
        }
        last = None
        for position, action in enumerate(a for a in actions if a.kind in cost):
            part = action.chunk * count + stage
            name = (str(action.kind), part, action.microbatch, position if action.kind == "update" else 0)
            edge((*name, "begin"), (*name, "end"), time=cost[action.kind])
            if last is not None:
                edge((*last, "end"), (*name, "begin"), time=0)
            last = name
    for part in range(count * found.chunks - 1):
        seconds = transfer[part % count]
        for kind, source, target in (("F", part, part + 1), ("B", part + 1, part)):
            for m in range(found.microbatches):
                made, needed = (kind, source, m, 0, "end"), (kind, target, m, 0, "begin")
                edge(made, needed, time=0 if found.hidden_transfers else seconds)
                if found.hidden_transfers:  # on the link from when the pass begins, behind the message before
                    carried = (kind, source, m, 0, "carried")
                    edge((kind, source, m, 0, "begin"), carried, time=seconds)
                    edge(carried, needed, time=0)
                    if m:
                        edge((kind, source, m - 1, 0, "carried"), carried, time=seconds)
    ends = {}
    for event in TopologicalSorter(graph).static_order():
        ends[event] = max((ends[source] + time for source, time in graph.get(event, {}).items()), default=0)
    return max(ends.values())


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_with_unequal_costs_the_time_is_the_longest_path(name):
    draw = random.Random(name)
    for _ in range(40):
        stages = draw.randint(2, 6)
        found = schedule(name, stages, draw.randint(1, 14))
        costs = [[draw.uniform(0, 3) for _ in range(stages)] for _ in range(5)]
        forward, backward, weight, transfer, update = costs
        timeline = simulate(found, forward, backward, weight, transfer, update)
        assert timeline.makespan == pytest.approx(longest_path(found, *costs), rel=1e-12)


def test_forward_and_backward_share_a_stage_without_losing_time():
    """One stage alone: its work is the time, whatever the shares are."""
    timeline = simulate(schedule("fbp-as", 1, 5), 1, 4)
    assert timeline.makespan == pytest.approx(25, rel=1e-12) and timeline.bubble == pytest.approx(0, abs=1e-12)
    (second,) = (span for span in timeline.spans if span.action.kind == "F" and span.action.microbatch == 1)
    (first,) = (span for span in timeline.spans if span.action.kind == "B" and span.action.microbatch == 0)
    assert (second.start, second.end) == (first.start, first.end) == (1, 6)


def test_sharing_keeps_every_stage_within_its_work_and_the_bottleneck_busy():
    draw = random.Random(0)
    for _ in range(50):
        stages, microbatches = draw.randint(1, 5), draw.randint(1, 12)
        forward, backward = ([draw.uniform(0.1, 3) for _ in range(stages)] for _ in range(2))
        timeline = simulate(schedule("fbp-as", stages, microbatches), forward, backward)
        work = [microbatches * (f + b) for f, b in zip(forward, backward, strict=True)]
        assert timeline.work == pytest.approx(sum(work))
        assert timeline.makespan >= max(max(work), sum(forward) + sum(backward)) * (1 - 1e-12)
        for span in timeline.spans:
            cost = {"F": forward, "B": backward}.get(str(span.action.kind), [0.0] * stages)[span.action.stage]
            assert span.end - span.start >= cost * (1 - 1e-9)


def test_replicas_of_a_synchronous_schedule_update_together():
    timeline = simulate(schedule("gpipe", 1, 3), 1, 2, update=5, replicas=2)
    updates = [(span.replica, span.start, span.end) for span in timeline.spans if span.action.kind == "update"]
    assert sorted(updates) == [(0, 6, 11), (1, 6, 11)]


@pytest.mark.parametrize("microbatches", [7, 24])
def test_an_asynchronous_schedule_is_made_again_for_the_replicas_it_is_simulated_with(microbatches):
    found = simulate(schedule("pipedream", 2, microbatches), [2, 1], [4, 2], replicas=[2, 1])
    given = simulate(schedule("pipedream", 2, microbatches, replicas=(2, 1)), [2, 1], [4, 2])
    assert (found.schedule, found.spans) == (given.schedule, given.spans)


def test_replicas_that_a_schedule_cannot_have_are_refused():
    with pytest.raises(ScheduleError, match="stale: option 'replicas' does not apply"):
        simulate(schedule("stale", 2, 4), 1, 2, replicas=[2, 1])
    with pytest.raises(ScheduleError, match="options cannot be applied to a Schedule object"):
        simulate(replace(schedule("pipedream", 2, 4), name="mine"), 1, 2, replicas=[2, 1])


def test_a_chunk_holds_its_share_of_an_activation():
    # Stage 0 begins five chunks ahead and stage 1 three, of micro-batches that keep 6 and 8 in two chunks.
    timeline = simulate(schedule("interleaved", 2, 4, chunks=2), 1, 2, activation=[6, 8])
    assert timeline.peak_activations == [5 * 3, 3 * 4]
