"""Layer profiles measured in training steps: which layers there are, what they carry, and whose time is whose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distconv.layers.sparse import SparseConv, SparseGlobalPool, coordinate_manager
from distconv.perfmodel.profiles.layer_timing import TimingError, _DeviceClock, time_layers
from tests.layers.sparse.clouds import random_cloud, rng_of

PAUSE = 0.5


class Pausing(torch.autograd.Function):
    """The identity; its passes take so many seconds of ``standing``, which nothing else takes."""

    now = 0.0

    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        Pausing.now += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Pausing.now += ctx.backward_s
        return gradient, None, None


class Pause(nn.Module):
    def __init__(self, forward_s, backward_s):
        super().__init__()
        self.seconds = forward_s, backward_s

    def forward(self, x):
        return Pausing.apply(x, *self.seconds)


@pytest.fixture
def standing(monkeypatch):
    """A clock that only a ``Pause`` moves."""
    monkeypatch.setattr(_DeviceClock, "now", lambda clock: Pausing.now)


class Residual(nn.Module):
    """Two linear layers, the first one twice, with a shortcut around all."""

    def __init__(self):
        super().__init__()
        self.entry, self.same, self.exit = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.entry(x)
        y = self.same(torch.relu(self.same(x)))
        return self.exit(x + y)


def layers_of(model, *shape, steps=1):
    return {layer.name: layer for layer in time_layers(model, [torch.rand(shape)], 0, steps).profile.layers}


def test_a_layer_has_what_follows_it_and_the_bytes_that_it_passes_on():
    found = time_layers(Residual(), [torch.rand(3, 4)], 0, 1).profile
    assert [layer.name for layer in found.layers] == ["entry", "same", "same#2", "exit"]
    assert set(found.edges) == {("entry", "same"), ("same", "same#2"), ("entry", "same#2"), ("same#2", "exit")}
    assert [layer.activation_bytes for layer in found.layers] == [96, 96, 96, 24]
    # The weights of a layer that is called twice are there once.
    assert [layer.parameter_bytes for layer in found.layers] == [160, 288, 0, 72]


def test_each_pass_is_counted_for_the_layer_that_takes_it(standing):
    model = nn.Sequential(nn.Linear(4, 4), Pause(PAUSE, 0), nn.Linear(4, 4), Pause(0, 2 * PAUSE), nn.Linear(4, 4))
    found = layers_of(model, 2, 4, steps=3)
    assert [layer.forward_s for layer in found.values()] == [0, PAUSE, 0, 0, 0]
    assert [layer.backward_s for layer in found.values()] == [0, 0, 0, 2 * PAUSE, 0]


def test_a_branch_that_another_layer_follows_keeps_its_own_backward_pass(standing):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.slow, self.other = nn.Linear(4, 4), Pause(0, PAUSE), nn.Linear(4, 4)

        def forward(self, x):
            x = self.first(x)
            return self.slow(x) + self.other(x)

    found = layers_of(Branches(), 2, 4)
    assert {name: layer.time_s for name, layer in found.items()} == {"first": 0, "slow": PAUSE, "other": 0}


def test_the_whole_step_is_measured_beside_the_layers(standing):
    # One pass to see the layers, one of the whole step, one of the layers in it.
    pause, seconds = Pause(0, 0), iter([0, 2 * PAUSE, 3 * PAUSE])
    pause.register_forward_pre_hook(lambda module, args: setattr(module, "seconds", (next(seconds), 0)))
    found = time_layers(nn.Sequential(pause, nn.Linear(4, 4)), [torch.rand(2, 4)], 0, 1)
    assert (found.step_s, found.ratio) == (2 * PAUSE, 1.5)


def test_steps_are_those_asked_for_and_each_measured_one_also_runs_without_hooks():
    model = nn.Sequential(nn.Linear(4, 4))
    calls = []
    model.register_forward_hook(lambda module, args, result: calls.append(len(module[0]._forward_pre_hooks)))
    time_layers(model, [torch.rand(2, 4)], warm_up=2, iterations=3)
    assert calls == [1, 0, 0] + [0, 1] * 3


def test_the_model_is_left_in_its_mode_without_gradients_or_hooks():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()
    time_layers(model, [torch.rand(2, 4)], 0, 1)
    assert not any(module.training or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_recurrent_layer_keeps_its_parameters():
    model = nn.LSTM(4, 8)
    assert layers_of(model, 5, 2, 4)["LSTM"].parameter_bytes == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(
    ("model", "shape", "counts", "text"),
    [
        (nn.Linear(4, 4), (2, 3), (0, 1), r"Linear does not train on input of shape \(2, 3\): RuntimeError"),
        (nn.ReLU(), (2, 3), (0, 1), "no output that requires a gradient"),
        (nn.Linear(4, 4), (2, 4), (-1, 1), "warm_up=-1"),
        (nn.Linear(4, 4), (2, 4), (0, 0), "iterations=0"),
    ],
)
def test_what_cannot_be_timed_is_refused(model, shape, counts, text):
    with pytest.raises(TimingError, match=text):
        time_layers(model, [torch.rand(shape)], *counts)


def test_a_model_that_calls_other_layers_each_time_is_refused():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 4), 0

        def forward(self, x):
            self.calls += 1
            for _ in range(self.calls):
                x = self.layer(x)
            return x

    with pytest.raises(TimingError, match="Growing called 1 layers in an earlier step and 3 in this one"):
        time_layers(Growing(), [torch.rand(2, 4)], 0, 1)


# -- sparse networks --------------------------------------------------------------------------------------------------


class SparseBlock(nn.Module):
    """Two convolutions around which the input goes too, then coarser sites."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = SparseConv(2, 3, 3), nn.BatchNorm1d(3)
        self.b, self.c = SparseConv(3, 3, 3), SparseConv(3, 4, 2, stride=2)
        self.pool, self.linear = SparseGlobalPool(), nn.Linear(4, 2)

    def forward(self, x):
        x = self.norm(self.a(x))
        return self.linear(self.pool(self.c(self.b(x) + x)))


def test_messages_of_a_sparse_network_are_features_with_their_coordinates():
    x = random_cloud(rng_of("timing"), 3, 2, sites=40).detach()
    profile = time_layers(SparseBlock().double(), [x], 0, 1).profile
    fine, coarse = len(x.coords), len({(row[0], *(c // 2 for c in row[1:])) for row in x.coords.tolist()})
    sizes = {layer.name: layer.activation_bytes for layer in profile.layers}
    site = {channels: 8 * (1 + 3) + 8 * channels for channels in (3, 4)}
    assert [sizes[name] for name in ("a", "norm", "b")] == [fine * site[3]] * 3
    assert (sizes["c"], sizes["pool"], sizes["linear"]) == (coarse * site[4], 4 * 4 * 8, 4 * 2 * 8)
    # The addition behind b is part of b.
    assert set(profile.edges) == {("a", "norm"), ("norm", "b"), ("b", "c"), ("c", "pool"), ("pool", "linear")}


def test_each_step_builds_its_kernel_maps_anew(monkeypatch):
    made = []
    real = coordinate_manager.kernel_map
    monkeypatch.setattr(coordinate_manager, "kernel_map", lambda *given: made.append(1) or real(*given))
    x = random_cloud(rng_of("anew"), 3, 2, sites=20).detach()
    time_layers(SparseBlock().double(), [x], 1, 2)
    steps = 1 + 1 + 2 * 2
    assert len(made) == 2 * steps  # a's, which b shares, and c's
    assert x.coordinate_manager.misses == 0
