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


def test_the_makespan_is_the_end_of_the_last_span():
    timeline = simulate(schedule("gpipe", 2, 2), 1, 2, update=3)
    assert timeline.makespan == max(span.end for span in timeline.spans) == 12
