"""Tables 4 to 6: a timed step is a training step of torch's by every method; the paper's shapes."""

from __future__ import annotations

import pytest
import torch

from distconv.jobs.papers.bppsa import epochs


def test_a_timed_step_is_a_step_of_torchs_by_every_way(monkeypatch):
    monkeypatch.setitem(epochs.RATES, "gru", 1e-2)
    setting = epochs.EpochSetting("", "gru", 7, 3, 4, (1, 1, 1, 1))
    torch.manual_seed(0)
    layer = torch.nn.GRU(4, epochs.HIDDEN, batch_first=True)
    head = torch.nn.Linear(epochs.HIDDEN, epochs.CLASSES)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], 1e-2)
    x, labels = torch.randn(3, 7, 5)[..., :-1], torch.randint(epochs.CLASSES, (3,))
    expected = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(head(layer(x)[0][:, -1]), labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert expected[-1] < 0.9 * expected[0]
    for method in ("autograd", "blelloch", "auto"):
        step = epochs.step_of(setting, method, back=True)
        assert [float(step()) for _ in range(10)] == pytest.approx(expected, rel=1e-4)
        forward = epochs.step_of(setting, method, back=False)
        assert float(forward()) == float(forward()) == pytest.approx(expected[0], rel=1e-5)


def test_rows_have_the_papers_shapes_and_ratios():
    assert {(s.steps, s.values) for s in epochs.TABLES["table-6"]} == {(259, 38), (517, 24), (1034, 12)}
    assert {name: len(rows) for name, rows in epochs.TABLES.items()} == {"table-4": 8, "table-5": 8, "table-6": 9}
    every = [epochs.ratios(*setting.published)[0] for rows in epochs.TABLES.values() for setting in rows]
    assert min(every) > 1 and max(every) == pytest.approx(2.04, abs=0.01)
    assert epochs.ratios(1, 3, 2, 3)[1] == 2 and epochs.ratios(1, 3, 3, 3)[1] != epochs.ratios(1, 3, 3, 3)[1]
