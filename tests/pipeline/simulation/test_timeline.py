"""Pictures and traces of simulated schedules."""

from __future__ import annotations

import json

from distconv.pipeline import schedule, simulate


def test_a_trace_holds_every_pass_with_its_time_stage_and_micro_batch(tmp_path):
    timeline = simulate(schedule("pipedream", 2, 4, replicas=[2, 1]), 1, 2, transfer=0.25)
    timeline.to_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["stage 0", "stage 1"]
    passes = {(e["pid"], e["name"]): e for e in events if e["cat" if e["ph"] == "X" else "ph"] in ("F", "B")}
    assert len(passes) == 16
    third = passes[0, "F3"]
    assert (third["tid"], third["ts"], third["dur"], third["args"]["microbatch"]) == (1, 1e6, 1e6, 3)
    assert passes[1, "F0"]["ts"] == 1.25e6


def test_a_bubble_is_what_all_replicas_do_not_work():
    """Four mini-batches over three replicas and one: drawn by hand.

    Stage 1 is busy from 1 to 13, with F0 B0 F1 B1 F2 B2 F3 B3; the first replica of stage 0 does B3 until 15 and the
    others have one mini-batch each. So 24 of 4 x 15 are work.
    """
    timeline = simulate(schedule("pipedream", 2, 4, replicas=[3, 1]), 1, 2)
    last = [span for span in timeline.spans if span.action.microbatch == 3 and span.action.kind == "B"]
    assert [(span.action.stage, span.replica, span.start, span.end) for span in last] == [
        (1, 0, 11, 13),
        (0, 0, 13, 15),
    ]
    assert (timeline.makespan, timeline.work) == (15, 24)
    assert timeline.bubble == 1 - 24 / 60
