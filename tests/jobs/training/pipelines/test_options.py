"""Options of pipelined training: each pair of them, a plan in a file, and what they come to for a number of ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from distconv.jobs.training.pipelines import options
from distconv.pipeline import PipelinePlan, ScheduleError
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import Line, describe_options, on_any_machine, pairs, parsed
from tests.jobs.training.observed_training import observed
from tests.jobs.training.pipelines.pipelined import pipelining


@pytest.mark.parametrize(
    ("ranks", "arguments", "replicas", "microbatches"),
    [
        (3, ["1f1b-so"], (1, 1, 1), 3),
        (4, ["gpipe", "--replicas", "2"], (2, 2), 2),
        (3, ["gpipe", "--replicas", "2,1", "--microbatches", "8"], (2, 1), 8),
        (4, ["stale", "--ppv", "3,5,7"], (1, 1, 1, 1), 1),
        (2, ["interleaved", "--ppv", "1,2,3"], (1, 1), 2),
        (4, ["pipedream", "--replicas", "3,1"], (3, 1), 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_stages_follow_from_the_ranks_and_the_options(
    ranks: int, arguments: list[str], replicas: tuple[int, ...], microbatches: int
) -> None:
    found = pipelining(ranks, *arguments)
    assert (found.replicas, found.microbatches) == (replicas, microbatches)


def test_running_statistics_are_the_pipelines_and_batch_norm_that_of_grids() -> None:
    assert pipelining(2, "gpipe", "--running-statistics", "deferred").batch_norm == "deferred"
    with pytest.raises(ScheduleError, match="--batch-norm: cannot be combined with a pipeline"):
        pipelining(2, "gpipe", "--batch-norm", "local")


def test_a_pipeline_does_not_split_the_optimizers_state() -> None:
    with pytest.raises(ScheduleError, match="--shard-optimizer: cannot be combined with a pipeline"):
        pipelining(2, "gpipe", "--shard-optimizer")


def test_a_part_has_the_replicas_of_its_stage() -> None:
    found = pipelining(3, "interleaved", "--ppv", "1,2,3", "--stages", "2", "--replicas", "1,2")
    assert (found.stages, found.chunks, found.part_replicas) == (2, 2, [1, 2, 1, 2])


def test_vertical_sync_is_an_option_of_the_schedule_only_where_it_is_asked_for() -> None:
    assert pipelining(2, "pipedream", "--vertical-sync").options == {"vertical_sync": True}
    assert pipelining(2, "pipedream").options == {}


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


def test_what_a_plan_says_of_its_pipeline_is_as_approved(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []
    for replicas, ranks, kinds in (((1, 3), 4, ("old", "new", "new", "new")), ((2, 2), 6, ())):
        plan = PipelinePlan(
            "lenet5", 12, ranks, ("c3", "c5", "f6"), replicas, ({"n": replicas[0]}, None), "interleaved",
            microbatches=6, weights="recompute", kinds=kinds,
        )  # fmt: skip
        monkeypatch.setattr(options.PipelinePlan, "load", lambda path, comm, plan=plan: plan)
        monkeypatch.setattr(options, "select_device", lambda name, comm: "cpu")
        monkeypatch.setattr(options, "kind_of_rank", lambda devices, comm, device: ",".join(devices))
        words = "--data x --batch 12 --pipeline-plan plan.json --devices old:1,new:3".split()
        found = options.planned_pipelining(parsed("train classify", *words), SimpleNamespace(size=ranks))
        assert found is not None
        lines.append(f"{found}, {found.stages} stages, {found.part_replicas}")
    assert_approved("planned-pipelines", "\n".join(lines))


def test_options_are_the_approved_ones() -> None:
    assert_approved("options/train-classify", on_any_machine("\n".join(describe_options("train classify"))))
