"""Figure 10: levels and FLOP of a pruned network, and pruning and training of it."""

from __future__ import annotations

import pytest
import torch

from distconv.jobs.papers.bppsa import pruned_vgg
from distconv.layers.models.vgg import vgg11
from tests.jobs.approved import assert_approved
from tests.jobs.images import image_files


@pytest.mark.long
def test_figure_10_has_the_papers_levels_and_pruning_saves_flop(capsys):
    half, most = (pruned_vgg.table(share, width=2) for share in (0.5, 0.97))
    assert_approved("bppsa-pruned", "\n".join(map(str, half)))
    printed = capsys.readouterr().out
    assert "21 layers" in printed and "L0-L4 upwards and L5-L10 downwards" in printed and "L0-L2, linear" in printed
    totals = [{row["method"]: row for row in rows if row["where"] == "all"} for rows in (half, most)]
    assert totals[1]["guaranteed truncated"]["total"] < totals[0]["guaranteed truncated"]["total"]
    assert totals[1]["this sample's linear"]["total"] <= totals[1]["guaranteed linear"]["total"]
    for of in totals:
        assert of["guaranteed linear"]["critical"] == of["guaranteed linear"]["total"]
        assert of["guaranteed truncated"]["critical"] < of["guaranteed truncated"]["total"]
        assert of["none BP"]["steps"] == 21
    assert not [row for row in most if "mm" in row["where"] and "up-sweep" not in row["where"]]


def test_figure_10_of_a_trained_network_has_weights_that_stay_zero_and_learn_beside_them(tmp_path, monkeypatch):
    image_files.write_cifar(tmp_path, train=16, test=8)
    seen = []
    chain = pruned_vgg.chain
    monkeypatch.setattr(pruned_vgg, "chain", lambda f, x, **of: (seen.append((f, x)), chain(f, x, **of))[1])
    recipe = pruned_vgg.PrunedVggRecipe(tmp_path, 3, 8, 0.05)
    rows = pruned_vgg.table(0.75, width=2, recipe=recipe)
    assert {row["method"] for row in rows if row["where"] == "all"} >= {"guaranteed truncated", "none BP"}
    features, x = seen[0]
    assert x.shape == (1, 3, 32, 32) and x.abs().max() > 0
    torch.manual_seed(0)
    initial = vgg11(2).features
    for layer, before in zip(features, initial, strict=True):
        if isinstance(layer, torch.nn.Conv2d):
            assert (layer.weight == 0).sum() == round(0.75 * layer.weight.numel())
            kept = layer.weight != 0
            assert not torch.equal(layer.weight[kept], before.weight[kept])


def test_what_is_pruned_are_the_smallest_and_training_leaves_them_at_zero():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 3))
    weight = model[1].weight.detach().clone()
    pruned = pruned_vgg.prune(model, 0.5)
    smallest = weight.abs() <= weight.abs().flatten().sort().values[8]
    assert torch.equal(model[1].weight == 0, smallest)
    data = [(torch.randn(4, 6), torch.tensor([0, 1, 2, 0])) for _ in range(3)]
    bias = model[1].bias.detach().clone()
    pruned_vgg.fit(model, iter(data), 0.1, pruned)
    assert torch.equal(model[1].weight == 0, smallest) and not torch.equal(model[1].bias, bias)
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in data)
    assert pruned_vgg.accuracy(model, data) == right / 12


def test_bps_flop_are_those_of_dense_convolutions_that_stay_inside():
    features = vgg11(4).features
    flops = pruned_vgg.baseline_flops(features, torch.randn(1, 3, 32, 32))[::-1]
    assert flops[0] == 2 * (3 * 32 - 2) ** 2 * 3 * 4
    assert flops[1] == 2 * 4 * 32 * 32 and flops[2] == 4 * 32 * 32 + 4 * 16 * 16
