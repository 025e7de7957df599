"""Figure 12's training without a pipeline against torch's plain loop; its table."""

from __future__ import annotations

import torch

from distconv.jobs.papers.bppsa import adam_staleness
from tests.jobs.images import image_files


def test_without_a_pipeline_adam_trains_as_in_a_plain_loop(monkeypatch):
    monkeypatch.setattr(adam_staleness, "FALLS", (1 / 2,))
    data = [(torch.randn(4, 6), torch.tensor([0, 1, 2, 0])) for _ in range(4)]
    models = [torch.nn.Linear(6, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    adam_staleness.train(models[0], "gpipe", data)
    optimizer = torch.optim.Adam(models[1].parameters(), adam_staleness.RATE)
    falls = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2])
    for x, y in data:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(models[1](x), y).backward()
        optimizer.step()
        falls.step()
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=1e-5, atol=0)


def test_the_table_has_top_1_and_top_5_of_both_from_each_seed(tmp_path, capsys):
    image_files.write_cifar(tmp_path, train=16, test=8)
    rows = adam_staleness.table(tmp_path, 2, 4, 2)
    assert [row["seed"] for row in rows] == [0, 1, 2]
    for row in rows:
        for first, five in (row["baseline"], row["PipeDream"]):
            assert 0 <= first <= five <= 1
    assert "top 5: PipeDream loses" in capsys.readouterr().out


def test_top_5_counts_what_is_among_the_first_five():
    scores = torch.arange(20.0).repeat(4, 1)  # in the order of the classes, the last one first
    data = [(scores, torch.tensor([19, 15, 14, 0]))]
    assert adam_staleness.accuracies(torch.nn.Identity(), data) == (1 / 4, 2 / 4)
