"""Ordinary torch modules on sparse tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.layers.sparse import SparseTensor
from tests.layers.sparse.clouds import normal, random_cloud, rng_of

MODULES = [
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.LeakyReLU(0.2),
    nn.PReLU(4),
    nn.ELU(),
    nn.SELU(),
    nn.CELU(),
    nn.GELU(),
    nn.SiLU(inplace=True),
    nn.Mish(),
    nn.Softplus(),
    nn.Softsign(),
    nn.Tanhshrink(),
    nn.Hardtanh(),
    nn.ReLU6(),
    nn.Hardswish(),
    nn.Hardsigmoid(),
    nn.LogSigmoid(),
    nn.Threshold(0.1, 2),
    nn.Sigmoid(),
    nn.Tanh(),
    nn.Softmax(1),
    nn.LogSoftmax(-1),
    nn.Linear(4, 3),
    nn.BatchNorm1d(4),
    nn.BatchNorm1d(4, affine=False).eval(),
    nn.LayerNorm(4),
    nn.RMSNorm(4),
    nn.Dropout(0.3),
    nn.AlphaDropout(0.3),
    nn.Identity(),
    nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU()),
]


def run(module, x, features):
    torch.manual_seed(3)
    return module(x if features is None else features)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_does_to_a_sparse_tensor_what_it_does_to_its_features(module):
    module = module.double()
    x = random_cloud(rng_of("modules"), 3, 4)
    theirs = run(module, None, x.features.detach().clone())
    ours = run(module, x.replace(x.features.clone()), None)
    assert isinstance(ours, SparseTensor) and ours.sites is x.sites
    torch.testing.assert_close(ours.features, theirs, rtol=0, atol=0)
    ours.features.sum().backward()
    assert x.features.grad is not None


def test_batch_norm_of_no_sites_leaves_its_statistics_alone():
    norm = nn.BatchNorm1d(4)
    y = norm(SparseTensor(torch.zeros(0, 4, dtype=torch.long), torch.zeros(0, 4), batch_size=1))
    y.features.sum().backward()
    assert not norm.running_mean.any() and (norm.running_var == 1).all()
    assert not norm.weight.grad.any() and not norm.bias.grad.any()


def test_concatenation_joins_channels():
    x = random_cloud(rng_of("cat"), 3, 2)
    y = x.replace(normal(len(x.coords), 3))
    assert torch.equal(torch.cat([x, y, x], 1).features, torch.cat([x.features, y.features, x.features], 1))
    assert torch.cat((x, y), dim=-1).shape[1] == 5


@pytest.mark.parametrize(
    "function",
    [
        lambda x: nn.Conv1d(4, 4, 1)(x),
        lambda x: nn.GroupNorm(2, 4)(x),
        lambda x: nn.MaxPool1d(2)(x),
        lambda x: nn.Softmax(0)(x),
        lambda x: F.log_softmax(x, dim=0),
        lambda x: nn.LayerNorm((len(x.coords), 4))(x),
        lambda x: torch.cat([x, x]),
        lambda x: torch.cat([x, x.features], 1),
        lambda x: torch.cat([x.features, x], 0),
        lambda x: torch.sum(x),
        lambda x: torch.mean(x, 0),
        lambda x: torch.matmul(x, x.features),
        lambda x: torch.sort(x),
        lambda x: torch.flatten(x),
        lambda x: F.cross_entropy(x, torch.zeros(len(x.coords), dtype=torch.long)),
        lambda x: x + x.features,
        lambda x: x.features + x,
        lambda x: x * torch.ones(len(x.coords), 1),
        lambda x: x + x.replace(x.features[:, :3]),
        lambda x: F.linear(x.features, x),
        lambda x: F.linear(x, x),
        lambda x: torch.add(x.features, other=x),
    ],
)
def test_functions_that_are_not_site_by_site_raise(function):
    x = random_cloud(rng_of("refused"), 3, 4, dtype=torch.float32)
    with pytest.raises(dc.UnsupportedOperation, match=r"has no rule\. Use the layers of"):
        function(x)
