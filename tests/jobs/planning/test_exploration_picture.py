"""The picture of an exploration: what it shows of an exploration made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distconv.jobs.planning import exploration_picture
from distconv.jobs.planning.exploration_picture import label, shown_choices
from distconv.layers.models import MODELS
from distconv.perfmodel import Exploration, explore, trace
from distconv.pipeline import possible_cuts
from tests.jobs.approved.figures import approve_figures


@pytest.fixture(scope="module")
def found() -> Exploration:
    model = MODELS["resnet20"]()
    return explore(
        lambda size: trace(model, (size, 3, 32, 32)),
        "localhost",
        4,
        16,
        microbatches=[4, 8],
        schedules=["dp", "gpipe"],
        joint=True,
        cuts=possible_cuts(model, torch.empty(2, 3, 32, 32)),
    )


def test_the_choice_and_the_fastest_others_are_shown_each_once(found):
    shown = shown_choices(found)
    assert found.best in shown
    assert len({label(choice) for choice in shown}) == len(shown)
    assert shown == sorted(shown, key=lambda choice: choice.time)
    fastest_of = {name: min(c.time for c in found.table if label(c) == name) for name in map(label, shown)}
    assert [choice.time for choice in shown] == [fastest_of[label(choice)] for choice in shown]


def test_a_choice_that_is_slower_than_what_does_not_fit_is_still_shown(found, monkeypatch):
    monkeypatch.setattr(exploration_picture, "MOST_CHOICES", 3)
    slow = max(found.table, key=lambda choice: choice.time)
    only = Exploration(
        slow, tuple(replace(c, fits=c is slow) if c is not slow else slow for c in found.table), 1e9, "q"
    )
    shown = shown_choices(only)
    assert len(shown) == 3 and shown[-1] is slow


def test_the_figure_is_as_approved(found, monkeypatch):
    pipeline = next(choice for choice in found.table if (len(choice.memory), choice.microbatches) == (4, 4))
    table = tuple(c if c is pipeline else replace(c, fits=c.schedule != "dp") for c in found.table)
    assert {choice.fits for choice in table} == {True, False}
    approve_figures(monkeypatch, exploration_picture, "exploration")
    exploration_picture.draw("x.png", replace(found, best=pipeline, table=table, room=5e8))
