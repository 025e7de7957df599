"""Errors in a schedule are reported with stage, operation and micro-batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distconv.pipeline import Action, Kind, Schedule, ScheduleError, schedule, simulate, validate


def change_schedule(name, change, stages=2, microbatches=3, **options):
    """A schedule whose lists ``change`` has altered."""
    found = schedule(name, stages, microbatches, **options)
    lists = [list(actions) for actions in found.stages]
    change(lists)
    return replace(found, stages=lists)


def index(actions, kind, microbatch, payload=None):
    return next(i for i, a in enumerate(actions) if (a.kind, a.microbatch, a.payload) == (kind, microbatch, payload))


def move(stage, kind, microbatch, to, payload=None):
    def change(lists):
        lists[stage].insert(to, lists[stage].pop(index(lists[stage], kind, microbatch, payload)))

    return change


def remove(stage, kind, microbatch, payload=None):
    return lambda lists: lists[stage].pop(index(lists[stage], kind, microbatch, payload))


def with_version(stage, kind, microbatch, version):
    def change(lists):
        position = index(lists[stage], kind, microbatch)
        lists[stage][position] = replace(lists[stage][position], version=version)

    return change


def with_peer(stage, kind, microbatch, peer):
    def change(lists):
        position = index(lists[stage], kind, microbatch, Kind.F)
        lists[stage][position] = replace(lists[stage][position], peer=peer)

    return change


def swapped_sends(lists):
    first, second = (index(lists[0], Kind.SEND, m, Kind.F) for m in (0, 1))
    lists[0].insert(second + 1, lists[0].pop(first))


def assert_rejected(name, change, message):
    with pytest.raises(ScheduleError) as error:
        validate(change_schedule(name, change))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpipe", move(1, Kind.B, 2, 0), "stage 1: B of micro-batch 2 comes before its F"),
        ("zero-bubble", move(0, Kind.W, 1, 0), "stage 0: W of micro-batch 1 comes before its B"),
        ("gpipe", remove(0, Kind.B, 1), "stage 0: B of micro-batch 1 is missing"),
        ("gpipe", lambda lists: lists[0].insert(0, lists[0][0]), "stage 0: F of micro-batch 0 occurs 2 times"),
        (
            "gpipe",
            lambda lists: lists[0].extend([Action(Kind.F, 0, 7, version=0), Action(Kind.B, 0, 7, version=0)]),
            "stage 0: B of micro-batch 7 is of no micro-batch or chunk",
        ),
        ("gpipe", lambda lists: lists.reverse(), "is in the list of stage 0"),
        (
            "gpipe",
            with_peer(0, Kind.SEND, 1, 9),
            "stage 0: send F of micro-batch 1 to stage 9 should be: stage 0: send F of micro-batch 1 to stage 1",
        ),
        (
            "gpipe",
            lambda lists: lists[1].append(Action(Kind.SEND, 1, 0, peer=0, payload=Kind.F)),
            "stage 1: send F of micro-batch 0 to stage 0 has no message that is sent",
        ),
        ("gpipe", remove(1, Kind.RECEIVE, 1, Kind.F), "stage 1: F of micro-batch 1 comes before its input is received"),
        (
            "gpipe",
            move(0, Kind.SEND, 1, 0, Kind.F),
            "stage 0: send F of micro-batch 1 to stage 1 comes before F has made it",
        ),
        (
            "gpipe",
            remove(0, Kind.SEND, 1, Kind.F),
            "receive F of micro-batch 1 from stage 0 is matched with another message",
        ),
        ("gpipe", remove(0, Kind.SEND, 2, Kind.F), "receive F of micro-batch 2 from stage 0 has no counterpart"),
        ("gpipe", swapped_sends, "is matched with another message: stage 0: send F of micro-batch 1 to stage 1"),
        (
            "pipedream",
            with_version(0, Kind.B, 1, 1),
            "stage 0: B of micro-batch 1 uses weights 1, but the policy 'stash' requires 0",
        ),
        ("pipedream", remove(0, Kind.STASH, 1), "stage 0: B of micro-batch 1 uses weights 0, but the stage has 1"),
        ("pipedream", with_version(0, Kind.UPDATE, 0, 2), "stage 0: update of micro-batch 0 makes version 2, not 1"),
        (
            "pipedream",
            with_version(0, Kind.STASH, 1, 1),
            "stage 0: stash of micro-batch 1 keeps version 1, but the newest is 0",
        ),
        ("stale", with_version(0, Kind.F, 1, 1), "stage 0: F of micro-batch 1 uses weights 1, but the stage has 0"),
        ("spectrain", remove(0, Kind.PREDICT, 1), "stage 0: F of micro-batch 1 uses weights 1, but the stage has 0"),
    ],
)
def test_what_is_wrong_is_named_with_stage_operation_and_micro_batch(name, change, message):
    assert_rejected(name, change, message)


def test_neighbours_that_send_to_each_other_at_once_are_a_deadlock():
    """1F1B as it is usually written: after its F and B, each stage sends first."""
    found = change_schedule("1f1b-sno", move(1, Kind.SEND, 0, 3, Kind.B))
    with pytest.raises(ScheduleError) as error:
        validate(found)
    assert str(error.value) == (
        "1f1b-sno: deadlock under synchronous sends: stage 0: send F of micro-batch 1 to stage 1; "
        "stage 1: send B of micro-batch 0 to stage 0 wait for each other"
    )


def test_a_receive_of_a_message_that_never_comes_ends_the_simulation():
    with pytest.raises(ScheduleError, match=r"these actions never become ready: .*stage 1: F of micro-batch 1"):
        simulate(change_schedule("gpipe", remove(0, Kind.SEND, 1, Kind.F)), 1, 2)


def test_a_schedule_written_by_hand_is_valid():
    passes = [Action(Kind.F, 0, 0, version=0), Action(Kind.B, 0, 0, version=0), Action(Kind.UPDATE, 0, version=1)]
    found = Schedule("mine", [passes], 1)
    validate(found)
    assert simulate(found, 1, 2).makespan == 3


def test_every_stage_must_update_as_often():
    with pytest.raises(ScheduleError, match="1f1b-sno: stage 1 has 0 updates, stage 0 has 1"):
        validate(change_schedule("1f1b-sno", lambda lists: lists[1].pop()))


def test_a_schedule_without_stages_is_refused():
    with pytest.raises(ScheduleError, match="x: there are no stages"):
        validate(Schedule("x", [], 4))


@pytest.mark.parametrize("weights", ["stash", "predict", "newest", "recompute"])
@pytest.mark.parametrize("name", ["stale", "pipedream", "spectrain"])
def test_a_schedule_is_valid_with_any_weights_that_it_takes(name, weights):
    validate(schedule(name, 3, 8, weights=weights))


@pytest.mark.parametrize("replicas", [[2, 1], [1, 2], [3, 1], [2, 3]])
def test_replicas_that_do_not_divide_the_mini_batches_are_valid_and_one_update_less_is_not(replicas):
    found = schedule("pipedream", 2, 7, replicas=replicas)
    validate(found)
    lists = [list(actions) for actions in found.stages]
    lists[1].pop(max(i for i, a in enumerate(lists[1]) if a.kind == "update" and a.microbatch == 6))
    with pytest.raises(ScheduleError, match="stage 1 has 6 updates, stage 0 has 7"):
        validate(replace(found, stages=lists))


def test_newest_weights_are_wanted_where_a_backward_runs_the_forward_again():
    with pytest.raises(ScheduleError, match="B of micro-batch 1 uses weights 0, but the stage has 1"):
        validate(change_schedule("stale", with_version(0, Kind.B, 1, 0), weights="recompute"))
