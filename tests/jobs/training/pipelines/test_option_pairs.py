"""Every pair of options of a pipelined training: what they come to, and what a plan in a file comes to."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from distconv.jobs.training.pipelines import options
from distconv.pipeline import PipelinePlan
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import Line, describe_options, on_any_machine, pairs, parsed
from tests.jobs.training.observed_training import observed

PIPELINE = (
    [("--replicas 2", {"replicas": 2})],
    [("--microbatches 5", {"microbatches": 5})],
    [("--weights newest", {"weights": "newest"})],
    [("--vertical-sync", {"vertical_sync": True})],
    [("--running-statistics deferred", {"batch_norm": "deferred"})],
    [("--switch-after 40", {"switch_after": 40})],
    [("--ppv 2", {"ppv": (2,)}), ("--stages 2", {"stages": 2}), ("--stages 3", {"stages": 3})],
    [("--model vgg16_bn", {})],
    [("--batch 90", {})],
)


@pytest.mark.parametrize(("schedule", "updates_each"), [("1f1b-so", False), ("pipedream", True), ("gpipe", False)])
@pytest.mark.parametrize("line", pairs(*PIPELINE), ids=str)
def test_pipelining_follows_from_each_pair_of_options(
    line: Line, schedule: str, updates_each: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dict(line.expected)
    replicas = given.get("replicas", 1)
    stages = 2 if "ppv" in given else given.get("stages", 6 // replicas)
    ranks = stages * replicas
    found = observed(monkeypatch, "classify", ["--data", "x", "--pipeline", schedule, *line.words], ranks=ranks)[
        "place"
    ]
    assert found == {
        "schedule": schedule,
        "replicas": (replicas,) * stages,
        "chunks": 1,
        "ppv": given.get("ppv"),
        "microbatches": given.get("microbatches", 1 if updates_each else stages),
        "weights": given.get("weights"),
        "vertical_sync": given.get("vertical_sync", False),
        "batch_norm": given.get("batch_norm", "micro"),
        "switch_after": given.get("switch_after"),
        "cuts": None,
        "plans": None,
        "kinds": (),
        "kind": None,
    }


@pytest.mark.parametrize(("replicas", "kinds"), [((1, 3), ("old", "new", "new", "new")), ((2, 2), ())])
def test_a_plan_says_all_of_its_pipeline(
    kinds: Any, replicas: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PipelinePlan(
        model="lenet5",
        batch=12,
        ranks=replicas[0] * replicas[0] + replicas[1],
        cuts=("c3", "c5", "f6"),
        replicas=replicas,
        plans=({"n": replicas[0]}, None),
        schedule="interleaved",
        microbatches=6,
        weights="recompute",
        kinds=kinds,
    )
    monkeypatch.setattr(options.PipelinePlan, "load", lambda path, comm: plan)
    monkeypatch.setattr(options, "select_device", lambda name, comm: "cpu")
    monkeypatch.setattr(options, "kind_of_rank", lambda devices, comm, device: ",".join(devices))
    words = "--data x --batch 12 --pipeline-plan plan.json --devices old:1,new:3".split()
    found = options.planned_pipelining(parsed("train classify", *words), SimpleNamespace(size=plan.ranks))
    assert found is not None and found.stages == 2 and found.part_replicas == [*replicas, *replicas]
    assert asdict(found) == {
        "schedule": "interleaved",
        "replicas": replicas,
        "chunks": 2,
        "ppv": None,
        "microbatches": 6,
        "weights": "recompute",
        "vertical_sync": False,
        "batch_norm": "micro",
        "switch_after": None,
        "cuts": ("c3", "c5", "f6"),
        "plans": plan.plans,
        "kinds": kinds,
        "kind": "old,new" if kinds else None,
    }


def test_options_are_the_approved_ones() -> None:
    assert_approved("options/train-classify", on_any_machine("\n".join(describe_options("train classify"))))
