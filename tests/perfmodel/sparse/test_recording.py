"""Recorded properties of each layer, compared with the layers."""

from __future__ import annotations

import torch
from torch import nn

from distconv.layers.sparse import SparseConv, SparseInstanceNorm, SparseTensor, prune
from distconv.perfmodel.sparse.recording import record
from tests.perfmodel.sparse.examples import cloud, network, resnet


def test_every_operation_is_seen_in_order() -> None:
    found = record(network(), cloud()).operations
    assert [(op.name, op.kind, op.channels, op.filters) for op in found] == [
        ("0", "convolution", 2, 4),
        ("1", "batch_norm", 4, 4),
        ("2", "pointwise", 4, 4),
        ("3", "convolution", 4, 6),
        ("4", "pooling", 6, 6),
        ("5", "linear", 6, 5),
        ("6", "convolution", 5, 3),
        ("7", "global_pool", 3, 3),
        ("8", "head", 3, 7),
    ]


def test_all_parameters_are_counted() -> None:
    for model in (network(), resnet()):
        counted = sum(op.parameters for op in record(model, cloud()).operations)
        assert counted == sum(parameter.numel() for parameter in model.parameters())


def test_the_first_layer_has_no_gradient_of_its_input_and_the_rest_has() -> None:
    assert [op.input_gradient for op in record(network(), cloud()).operations] == [False] + 8 * [True]


def test_layers_with_the_same_sites_and_kernel_share_a_map() -> None:
    model = nn.Sequential(SparseConv(2, 3, 3), SparseConv(3, 3, 3), SparseConv(3, 3, 2, stride=2)).double()
    keys = [op.window.key for op in record(model, cloud()).operations if op.window]
    assert keys[0] == keys[1] != keys[2]


def test_the_model_and_the_example_stay_as_they_were() -> None:
    model, x = network(), cloud()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    record(model.eval(), x)
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert x.coordinate_manager.misses == 0


def test_pruning_broadcasts_and_norms_leave_the_layers_as_they_are() -> None:
    class Combined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = SparseConv(2, 3, 3), SparseInstanceNorm(3), SparseConv(3, 4, 2, 2)

        def forward(self, x: SparseTensor) -> SparseTensor:
            x = self.norm(self.first(x))
            return self.last(prune(x, x.features[:, 0] > 0))

    found = [op for op in record(Combined().double(), cloud()).operations if op.kind != "pointwise"]
    assert [(op.name, op.kind, op.channels, op.filters) for op in found] == [
        ("first", "convolution", 2, 3),
        ("norm._mean", "global_pool", 3, 3),
        ("norm._mean", "global_pool", 3, 3),
        ("last", "convolution", 3, 4),
    ]
