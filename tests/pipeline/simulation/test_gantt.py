"""Pictures of schedules."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from distconv.pipeline import FAMILIES, ScheduleError, schedule, simulate
from distconv.pipeline.simulation.gantt import COLOURS, draw_spans

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_picture_is_written_in_the_format_of_its_extension(tmp_path):
    simulate(schedule("gpipe", 2, 2), 1, 2).plot(tmp_path / "gantt.png")
    assert (tmp_path / "gantt.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("path", ["", "picture"])
def test_a_picture_needs_an_ending(path, tmp_path):
    with pytest.raises(ScheduleError, match="has no extension that determines the format"):
        simulate(schedule("gpipe", 2, 2), 1, 2).plot(tmp_path / path)
    assert list(tmp_path.iterdir()) == []


def bars(timeline):
    """Middle, start, end and opacity of each pass that is drawn."""
    axis = Figure().add_subplot()
    draw_spans(axis, timeline.schedule, timeline.spans, timeline.replicas)
    assert axis.yaxis_inverted()  # rows go downwards
    found = [
        (b.get_y() + b.get_height() / 2, b.get_x(), b.get_x() + b.get_width(), b.get_alpha()) for b in axis.patches
    ]
    return [pytest.approx(bar) for bar in sorted(found)], [label.get_text() for label in axis.get_yticklabels()]


def test_every_rank_has_a_row_and_every_pass_its_time():
    found, rows = bars(simulate(schedule("pipedream", 2, 2, replicas=[2, 1]), 1, 2))
    # F0 and F1 at once on two replicas, then F0 B0 F1 B1 on the only rank of the second stage.
    assert found == [(0, 0, 1, 1), (0, 4, 6, 1), (1, 0, 1, 1), (1, 7, 9, 1),
                     (2, 1, 2, 1), (2, 2, 4, 1), (2, 4, 5, 1), (2, 5, 7, 1)]  # fmt: skip
    assert rows == ["stage 0, replica 0", "stage 0, replica 1", "stage 1, replica 0"]


def test_where_passes_share_a_rank_backward_is_the_lower_half():
    found, _ = bars(simulate(schedule("fbp-as", 1, 2), 1, 4))
    assert found == [(-0.2, 0, 1, 1), (-0.2, 1, 6, 1), (0.2, 1, 6, 1), (0.2, 6, 10, 1)]


def test_later_chunks_are_darker():
    found, _ = bars(simulate(schedule("interleaved", 1, 1, chunks=2), 2, 4))
    assert found == [(0, 0, 1, 0.5), (0, 1, 2, 1), (0, 2, 4, 1), (0, 4, 6, 0.5)]


@pytest.mark.parametrize("name", FAMILIES)
def test_time_begins_at_nought_and_the_legend_names_the_kinds_that_are_drawn(name):
    timeline = simulate(schedule(name, 3, 5), [1, 2, 1.5], 2, weight=1.5, update=0.5)
    axis = Figure().add_subplot()
    draw_spans(axis, timeline.schedule, timeline.spans, timeline.replicas)
    assert axis.get_xlim() == (0, max(span.end for span in timeline.spans))
    kinds = {span.action.kind for span in timeline.spans if span.end > span.start}
    legend = axis.get_legend()
    assert {text.get_text() for text in legend.get_texts()} == {str(kind) for kind in kinds}
    shown = {patch.get_label(): to_hex(patch.get_facecolor()) for patch in legend.get_patches()}
    assert shown == {str(kind): colour for kind, colour in COLOURS.items() if kind in kinds}
    assert len(axis.patches) == len([span for span in timeline.spans if span.end > span.start])


def test_a_pass_has_the_number_of_its_micro_batch_in_its_middle():
    timeline = simulate(schedule("1f1b-sno", 2, 2), 1, 1, weight=1.5, update=0.5)
    axis = Figure().add_subplot()
    draw_spans(axis, timeline.schedule, timeline.spans, timeline.replicas)
    numbers = sorted((text.get_position(), text.get_text()) for text in axis.texts)
    rows = [(span, span.action.stage) for span in timeline.spans if span.action.microbatch is not None]
    middles = sorted((((span.start + span.end) / 2, row), str(span.action.microbatch)) for span, row in rows)
    assert numbers == middles
