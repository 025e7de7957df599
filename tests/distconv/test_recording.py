"""Without a recording functions are just called; while a step is recorded the recorder is asked."""

from __future__ import annotations

import torch

from distconv import recording


class Listening:
    paused = False

    def __init__(self):
        self.calls = []

    def call(self, function, tensors, launches=False):
        self.calls.append(launches)
        return function(*tensors)


def test_without_a_recording_functions_are_called():
    x = torch.zeros(2)
    assert recording.call(torch.add, x, torch.ones(2)).tolist() == [1, 1]
    recording.launch(torch.Tensor.neg_, x.add_(1))
    assert x.tolist() == [-1, -1]
    with recording.paused():
        assert recording.active is None


def test_a_recorder_is_asked(monkeypatch):
    recorder = Listening()
    monkeypatch.setattr(recording, "active", recorder)
    recording.call(torch.neg, torch.zeros(2))
    recording.launch(torch.neg, torch.zeros(2))
    assert recorder.calls == [False, True]
    with recording.paused():
        assert recorder.paused
    assert not recorder.paused
