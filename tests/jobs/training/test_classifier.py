"""What a network has to beat. (The report is tested with the commands that print it.)"""

from __future__ import annotations

import numpy as np

from distconv.jobs.training.classifier import majority_vote


def test_a_majority_vote_answers_what_is_most_frequent_in_training() -> None:
    # 2 in training, where 0 is most frequent among what is held out.
    assert majority_vote(np.array([2, 0, 2, 1]), np.array([0, 0, 0, 2, 1])) == 0.2
