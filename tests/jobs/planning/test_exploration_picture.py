"""The picture of an exploration: what it shows of an exploration made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from matplotlib.colors import to_rgba

from distconv.jobs.planning import exploration_picture
from distconv.jobs.planning.chosen_pipeline import timeline
from distconv.jobs.planning.exploration_picture import label, shown_choices
from distconv.layers.models import MODELS
from distconv.perfmodel import Exploration, explore, trace
from distconv.pipeline import possible_cuts


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


def test_a_combination_in_words(found):
    assert {label(c) for c in found.table if c.schedule == "dp"} >= {"dp, 1 stage, 4 replicas, 8 micro-batches"}


def test_colours_numbers_and_titles_say_what_was_chosen_and_what_does_not_fit(found, tmp_path, monkeypatch):
    pipeline = next(choice for choice in found.table if len(choice.memory) == 4 and choice.replicas == 1)
    table = tuple(c if c is pipeline else replace(c, fits=c.schedule != "dp") for c in found.table)
    figures = []
    monkeypatch.setattr(exploration_picture, "write_picture", lambda path, figure, dpi: figures.append(figure))
    exploration = replace(found, best=pipeline, table=table, room=5e8)
    exploration_picture.draw(tmp_path / "x.png", exploration)
    choices, memory, passes = figures[0].axes
    shown = shown_choices(exploration)
    assert [text.get_text() for text in choices.get_yticklabels()] == [label(choice) for choice in shown]
    assert [bar.get_width() for bar in choices.patches] == pytest.approx([1e3 * choice.time for choice in shown])
    assert [text.get_text() for text in choices.texts] == [f" {1e3 * choice.time:.4g}" for choice in shown]
    assert [text.get_position()[0] for text in choices.texts] == pytest.approx([1e3 * choice.time for choice in shown])
    for bar, choice in zip(choices.patches, shown, strict=True):
        face, edge = ("tab:blue" if choice is pipeline else "0.75"), "0.75"
        if not choice.fits:
            face, edge = "none", "tab:red"
        assert (bar.get_facecolor(), bar.get_edgecolor()) == (to_rgba(face), to_rgba(edge))
    assert {choice.fits for choice in shown} == {True, False} and choices.yaxis_inverted()
    assert choices.get_title() == f"fastest of {len(table)} combinations (blue: chosen; red: does not fit)"
    assert [bar.get_height() for bar in memory.patches] == pytest.approx([size / 1e9 for size in pipeline.memory])
    ends = [bar.get_x() + bar.get_width() for bar in passes.patches]
    assert max(ends) == pytest.approx(1e3 * pipeline.time, rel=0.05)
    assert "ms" in choices.get_xlabel() and "ms" in passes.get_xlabel() and "GB" in memory.get_ylabel()
    (line,) = memory.lines
    assert line.get_ydata()[0] == 0.5 and memory.get_ylim() == (0, pytest.approx(0.575))
    assert memory.texts[-1].get_text() == "limit: 0.5 GB"
    begins = ["input", *(stage[0] for stage in pipeline.stages.stages[1:])]
    names = [f"{stage}: {begin}" for stage, begin in enumerate(begins)]
    assert [text.get_text() for text in memory.get_xticklabels()] == names
    bubble = timeline(pipeline).bubble
    assert passes.get_title() == f"passes of the choice: bubble {bubble:.1%}"
    assert figures[0].get_suptitle() == f"{found.question}: {label(pipeline)}, {1e3 * pipeline.time:.4g} ms"
