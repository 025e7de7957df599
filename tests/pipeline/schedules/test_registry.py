"""Counts and options of schedules, and errors for invalid ones."""

from __future__ import annotations

import numpy as np
import pytest

from distconv.pipeline import ScheduleError, schedule


def test_counts_may_be_whole_numbers_of_numpy():
    assert schedule("gpipe", np.int64(2), np.int32(3)) == schedule("gpipe", 2, 3)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("1f1b", 2, 2), {}, "there is no schedule '1f1b'; there are gpipe, 1f1b-sno"),
        (("pipedream", 2, 2), {"chunks": 2}, "does not apply; its options: vertical_sync, replicas"),
        (("pipedream", 2, 2), {"vertical_sync": "no"}, "pipedream: vertical_sync='no' is neither"),
        (("pipedream", 2, 2), {"replicas": [1, 0]}, "replicas of stage 1=0 is not"),
        (("pipedream", 2, 2), {"replicas": 1.5}, "replicas of stage 0=1.5 is not"),
    ],
)
def test_what_cannot_be_scheduled_is_refused_in_a_line(arguments, options, message):
    with pytest.raises(ScheduleError) as error:
        schedule(*arguments, **options)
    assert message in str(error.value) and "\n" not in str(error.value)
