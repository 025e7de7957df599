"""A schedule without an end: steps and what is left, against long schedules."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distconv.pipeline import Kind, schedule
from distconv.pipeline.schedules.steady_state import SteadyStream

NAMES = ("pipedream", "spectrain", "stale")
POLICIES = (None, "stash", "predict", "newest", "recompute")


@st.composite
def streams(draw):
    """Name, stages, number of mini-batches and options of an asynchronous schedule."""
    name = draw(st.sampled_from(NAMES))
    stages = draw(st.integers(1, 5))
    options = {"weights": draw(st.sampled_from(POLICIES))}
    if name == "pipedream":
        options["replicas"] = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
        if options["weights"] in (None, "stash") and len(set(options["replicas"])) == 1:
            options["vertical_sync"] = draw(st.booleans())
    return name, stages, draw(st.integers(1, 40)), options


@pytest.mark.long
@settings(max_examples=60)
@given(streams())
def test_steps_and_what_is_left_are_the_schedule_of_that_many_mini_batches(case):
    name, stages, count, options = case
    stream, whole = SteadyStream(name, stages, **options), schedule(name, stages, count, **options)
    for stage, replicas in enumerate(stream.replicas):
        for replica in range(replicas):
            steps = [action for number in range(count) for action in stream.step_actions(stage, replica, number)]
            found = steps + stream.remaining_actions(stage, replica, count)
            assert _passes(found) == _passes(whole.replica_actions(stage, replica, replicas))
            assert _messages(found, count) == _messages(whole.replica_actions(stage, replica, replicas), count)


def _passes(actions):
    """All but messages, whose order may differ, and copies kept for mini-batches that never come."""
    return [action for action in actions if action.payload is None and action.kind is not Kind.STASH]


def _messages(actions, count):
    """The messages of the first ``count`` mini-batches in each direction and kind, in order."""
    real = [action for action in actions if action.payload is not None and action.microbatch < count]
    return {(a.kind, a.payload): [b for b in real if (b.kind, b.payload) == (a.kind, a.payload)] for a in real}


@settings(max_examples=60)
@given(streams())
def test_every_step_runs_to_its_end_without_the_next_one(case):
    name, stages, count, options = case
    stream = SteadyStream(name, stages, **options)
    made = set()
    for number in range(count):
        waiting = {
            (stage, replica): list(stream.step_actions(stage, replica, number))
            for stage, replicas in enumerate(stream.replicas)
            for replica in range(replicas)
        }
        _run(stream, waiting, made)
        assert not any(waiting.values()), f"step {number} waits: {waiting}"


def _run(stream, waiting, made):
    """Do what can be done: sends never wait, updates of replicas wait for each other."""

    def ready(rank, action):
        if action.kind is Kind.UPDATE:
            heads = [waiting[other][0] for other in waiting if other[0] == rank[0] and waiting[other]]
            alike = [head for head in heads if (head.kind, head.version) == (Kind.UPDATE, action.version)]
            return len(alike) + updated.get((rank[0], action.version), 0) == stream.replicas[rank[0]]
        needed = stream.schedule.input_of(action)
        return needed is None or needed in made or stages == 1

    stages, updated, moved = len(stream.replicas), {}, True
    while moved:
        moved = False
        for rank, actions in waiting.items():
            while actions and ready(rank, actions[0]):
                action = actions.pop(0)
                made.add(stream.schedule.output_of(action))
                if action.kind is Kind.UPDATE:
                    key = rank[0], action.version
                    updated[key] = updated.get(key, 0) + 1
                moved = True


@pytest.mark.parametrize(
    ("name", "stages", "behind"), [("stale", 4, 6), ("pipedream", 4, 3), ("spectrain", 1, 0), ("stale", 1, 0)]
)
def test_a_mini_batch_is_complete_when_the_first_stage_has_used_it(name, stages, behind):
    stream = SteadyStream(name, stages)
    assert [stream.completed(number) for number in range(60)] == [max(0, number + 1 - behind) for number in range(60)]


def test_replicas_complete_their_mini_batches_together():
    found = [SteadyStream("pipedream", 2, replicas=[2, 1]).completed(number) for number in range(40)]
    assert found == [max(0, (number - 1) // 2 * 2) for number in range(40)]
