"""Tracing: which operations a network runs, what flows between them and what autograd keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distconv.layers.models import MODELS
from distconv.perfmodel.graph.tracing import TraceError, trace

SAMPLES = {
    "mesh1k": (18, 64, 64),
    "mesh2k": (18, 128, 128),
    "unet": (18, 64, 64),
    "unet3d": (1, 32, 32, 32),
    "cosmoflow": (4, 64, 64, 64),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        y = F.relu(self.norm(self.conv1(x)), inplace=True)
        y = self.conv2(y) + y
        if y.shape[2] > 4:  # Python that depends on shapes
            y = y[:, :, ::2]
        return self.head(y.mean((2, 3)))


def test_a_loss_is_part_of_the_graph_with_the_distribution_of_what_it_is_of():
    target = torch.zeros(2, dtype=torch.int64, device="meta")
    alone, both = (
        trace(Block(), (2, 4, 8, 8), loss=loss).operations for loss in (None, lambda y: F.cross_entropy(y, target))
    )
    assert [(op.name, op.layer) for op in both[: len(alone)]] == [(op.name, op.layer) for op in alone]
    (loss,) = both[len(alone) :]
    assert (loss.kind, loss.layer, loss.y.shape, loss.y.requires_grad) == ("cross_entropy", "head", (), True)


@pytest.mark.parametrize("name", ["unet", "resnet20", "vgg11_bn", "lenet5"])
def test_what_is_saved_is_what_autograd_saves_when_the_model_really_runs(name):
    model = MODELS[name].factory()
    shape = (2, *SAMPLES.get(name, MODELS[name].sample))
    graph = trace(model, shape)
    x = torch.randn(shape)
    kept: dict[int, int] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = model(x)
    parameters = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    really = sum(size for pointer, size in kept.items() if pointer not in parameters)
    traced: dict[int, int] = {}
    for op in graph.operations:
        for value in op.saved:
            traced[value.storage] = max(traced.get(value.storage, 0), value.elements * value.itemsize)
    assert result is not None
    assert sum(traced.values()) == pytest.approx(really, rel=0.01)


def test_tracing_changes_nothing_about_the_model():
    model = Block().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    trace(model, (2, 4, 8, 8))
    assert not model.training and not model.norm.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert not any(len(module._forward_hooks) for module in model.modules())


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)

    def forward(self, x):
        y = self.conv(x)
        return y * y.max().item()


@pytest.mark.parametrize(
    ("model", "shape", "text"),
    [
        (Reading(), (2, 4, 8, 8), "reads elements"),
        (Block(), (2, 3, 8, 8), "channel dimensions .in conv1."),
        (nn.ReLU(), (2, 4), "no convolution or linear layer"),
        (Block(), (0, 4, 8, 8), "positive whole numbers"),
        (Block(), (2, 4.0, 8, 8), "positive whole numbers"),
        (Block(), (), "positive whole numbers"),
    ],
)
def test_what_cannot_be_traced_is_told_in_one_line(model, shape, text):
    with pytest.raises(TraceError, match=text) as error:
        trace(model, shape)
    assert "\n" not in str(error.value)
