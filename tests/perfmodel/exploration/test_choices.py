"""Choices in words: what was chosen, what else there was, and what did not fit."""

from __future__ import annotations

from distconv.perfmodel.exploration.choices import Choice, Exploration, StageCosts
from distconv.perfmodel.stages.stage_costs import StagePartition


def choice(time, *, fits=True, **given):
    stages = StagePartition(
        method="explore", cuts=(1,), positions=(1.0,), stages=(("a",), ("b",)), assignment=({}, {}), time=time
    )
    known = {"schedule": "gpipe", "microbatches": 8, "replicas": 1, "memory": (2e9, 3.5e9)} | given
    return Choice(stages=stages, time=time, fits=fits, costs=StageCosts((), (), (), ()), **known)


def test_a_choice_is_a_line_that_says_more_only_where_there_is_more():
    assert str(choice(1.5)).split("  ")[0] == "gpipe"
    assert " ".join(str(choice(1.5)).split()) == "gpipe 2 stages 8 micro-batches 1.5 s 3.5 GB"
    full = choice(1.5, fits=False, replicas=2, width=4)
    said = "gpipe 2 stages x 2 replicas of 4 ranks 8 micro-batches 1.5 s 3.5 GB: too much"
    assert " ".join(str(full).split()) == said
    assert " ".join(str(choice(1.5, schedule="dp", memory=(2e9,))).split()).startswith("dp 1 stage 8 micro-batches")


def test_of_each_schedule_the_first_that_fits_is_shown_with_how_much_slower_it_is():
    best, slower = choice(2.0), choice(3.0, schedule="1f1b-so")
    table = (best, choice(2.5), slower, choice(1.0, schedule="stale", fits=False))
    found = Exploration(best, table, room=4e9, question="what was asked")
    first, chosen, cut, *leaders, last = found.explain().splitlines()
    assert first == "what was asked" and chosen == f"best: {best}"
    assert cut == "cut before b; GB of each stage: 2, 3.5"
    assert leaders == [f"{best}  1.00 x", f"{slower}  1.50 x"]
    assert last == "4 combinations, 1 of them beyond 4 GB"
    assert (found.time, found.memory, found.schedule) == (2.0, 3.5e9, "gpipe")
