"""Options of pipelined training: what they come to for a number of ranks."""

from __future__ import annotations

import pytest

from distconv.pipeline import ScheduleError
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
