"""Without a recording the functions just do what they say; within one the recorder is asked."""

from __future__ import annotations

import torch

from distconv import recording


class Listening:
    paused = False

    def __init__(self):
        self.told = []

    def call(self, function, tensors):
        self.told.append("call")
        return function(*tensors)

    def branch(self, flag, body, changed):
        self.told.append("branch")


def test_without_a_recording_calls_are_made_and_branches_taken_where_the_flag_is_true():
    x = torch.zeros(2)
    assert recording.call(torch.add, x, torch.ones(2)).tolist() == [1, 1]
    recording.branch(torch.tensor(False), lambda: x.add_(1), (x,))
    assert x.tolist() == [0, 0]
    recording.branch(torch.tensor(True), lambda: x.add_(1), (x,))
    assert x.tolist() == [1, 1]
    with recording.paused():
        assert recording.active is None


def test_a_recorder_is_told(monkeypatch):
    recorder = Listening()
    monkeypatch.setattr(recording, "active", recorder)
    x = torch.zeros(2)
    recording.call(torch.neg, x)
    recording.branch(torch.tensor(True), lambda: x.add_(1), (x,))
    assert recorder.told == ["call", "branch"]
    assert x.tolist() == [0, 0]
    with recording.paused():
        assert recorder.paused
    assert not recorder.paused
