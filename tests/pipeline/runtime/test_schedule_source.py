"""Schedules of a pipeline, by name or as an object, and errors for invalid ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distconv.pipeline import ScheduleError, schedule
from distconv.pipeline.runtime.schedule_source import count_chunks, resolve_schedule


def resolve(given, stages=2, replicas=None, microbatches=1, weights=None, **options):
    return resolve_schedule(
        given=given,
        stages=stages,
        replicas=(1,) * stages if replicas is None else replicas,
        microbatches=microbatches,
        weights=weights,
        options=options,
    )


@pytest.mark.parametrize(
    ("name", "options"), [("gpipe", {}), ("zero-bubble", {}), ("interleaved", {"chunks": 3}), ("1f1b-so", {})]
)
@pytest.mark.parametrize("weights", [None, "recompute"])
def test_a_name_is_a_schedule_for_any_number_of_micro_batches(name, options, weights):
    found = resolve(name, microbatches=4, weights=weights, **options)
    assert (found.microbatches, found.stream) == (4, None)
    for count in (1, 3, 4):
        assert found.make(count) == schedule(name, 2, count, weights=weights, **options)
    assert found.begins == found.make(1)


@pytest.mark.parametrize(
    ("name", "replicas", "options"),
    [("stale", (1, 1), {}), ("pipedream", (2, 1), {}), ("spectrain", (1, 1), {"weights": "stash"})],
)
def test_an_asynchronous_schedule_goes_on_without_an_end(name, replicas, options):
    found = resolve(name, replicas=replicas, **options)
    assert found.microbatches == 1 and found.stream is not None
    assert found.begins == found.stream.schedule and found.begins.replicas == replicas
    more = {"replicas": replicas} if name == "pipedream" else {}
    assert found.begins == schedule(name, 2, found.begins.microbatches, **options, **more)
    assert found.stream.step_actions(0, 0, 0)


def test_of_a_schedule_that_has_a_name_that_and_its_options_count():
    given = schedule("interleaved", 2, 4, chunks=3, weights="recompute")
    found = resolve(given)
    assert found.microbatches == 4
    assert resolve(given, microbatches=6).microbatches == 6
    assert found.make(5) == schedule("interleaved", 2, 5, chunks=3, weights="recompute")
    stream = resolve(schedule("pipedream", 2, 8, replicas=(1, 2)), replicas=(1, 2)).stream
    assert stream is not None and stream.replicas == (1, 2)


@pytest.mark.parametrize("name", ["mine", "gpipe"])
def test_a_schedule_of_ones_own_is_followed_as_it_is(name):
    own = replace(schedule("1f1b-sno", 2, 4), name=name)
    found = resolve(own)
    assert found.microbatches == 4 and found.make(4) is own and found.begins is own
    with pytest.raises(ScheduleError, match=f"{name}: a schedule of 4 micro-batches cannot run 3"):
        found.make(3)


OWN = replace(schedule("stale", 2, 4), name="mine")
REFUSED = {
    "micro-batches that are no number": ("gpipe", {"microbatches": 1.5}, r"gpipe: microbatches=1\.5 is not a whole"),
    "forward beside backward": ("fbp-as", {}, "fbp-as: forward and backward at the same time"),
    "asynchronous micro-batches": ("stale", {"microbatches": 2}, "stale: microbatches=2, but it updates after every"),
    "replicas without": ("stale", {"replicas": (1, 2)}, "stale has no replicas; give every stage one rank"),
    "a switch to come": ("stale", {"switch_after": 2}, r"switch_after applies to simulations only; call switch\(\)"),
    "an unknown name": ("none such", {}, "there is no schedule 'none such'"),
    "other stages": (schedule("gpipe", 3, 2), {}, "a schedule of 3 stages, but there are 2"),
    "other replicas": (
        schedule("pipedream", 2, 4, replicas=(2, 1)),
        {"replicas": (1, 2)},
        r"a schedule for replicas \[2, 1\], but there are \[1, 2\]",
    ),
    "options beside a schedule": (
        schedule("gpipe", 2, 2),
        {"weights": "recompute"},
        r"weights cannot be applied to a Schedule object",
    ),
    "what cannot run": (replace(schedule("gpipe", 2, 2), stages=[[], []]), {}, "is missing"),
    "an asynchronous one of one's own": (OWN, {}, "mine: an asynchronous Schedule object has a fixed number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses(name):
    given, arguments, words = REFUSED[name]
    with pytest.raises(ScheduleError, match=words):
        resolve(given, **arguments)


@pytest.mark.parametrize(
    ("given", "options", "chunks"),
    [
        ("interleaved", {}, 2),
        ("interleaved", {"chunks": 3, "weights": "recompute"}, 3),
        ("gpipe", {"chunks": 3}, 1),
        ("none such", {}, 1),
        (schedule("interleaved", 2, 2, chunks=4), {}, 4),
    ],
)
def test_each_rank_has_the_chunks_of_the_schedule(given, options, chunks):
    assert count_chunks(given, options) == chunks
