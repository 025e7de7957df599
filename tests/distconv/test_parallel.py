"""Whole gradients on every rank, whatever the model does with its parameters, at once or behind backward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import distconv as dc
from distconv.parameters import gradient_reduction
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere

IMAGES, LABELS = normal(3, 2, 7, 9), torch.tensor([0, 2, 1])


class Convolutions(nn.Module):
    """What most scenarios share: a convolution, batch norm, a second one."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, stride=2, padding=1)

    def forward(self, x):
        return self.second(F.relu(self.norm(self.first(x))))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Convolutions(), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.adaptive_avg_pool2d(self.body(x), 1).flatten(1))


class SqueezeExcite(Pooled):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 4)

    def forward(self, x):
        y = self.body(x)
        y = y * torch.sigmoid(self.gate(y.mean((2, 3))))[:, :, None, None]
        return self.head(y.mean((2, 3)))


class Tied(Pooled):
    def __init__(self):
        super().__init__()
        self.tied = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = self.tied(self.tied(self.body(x)))
        return self.head(y.mean((2, 3))) * self.tied.weight.abs().mean()


class WeightNorm(Pooled):
    def __init__(self):
        super().__init__()
        self.normed = weight_norm(nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, x):
        return self.head(self.normed(self.body(x)).mean((2, 3)))


class Unused(Pooled):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(5, 5)


class Scaled(Pooled):
    def __init__(self):
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x):
        return self.head((self.body(x) * self.scale + self.offset).mean((2, 3)))


class GatheredHead(Pooled):
    def forward(self, x):
        return self.head(dc.gather(self.body(x)).mean((2, 3)))


class InterleavedHead(Pooled):
    """The same parameters on a distributed and on a gathered tensor."""

    def forward(self, x):
        y = self.body(x).mean((2, 3))
        return self.head(dc.gather(y)) + dc.gather(self.head(y))


SCENARIOS = {kind.__name__: kind for kind in (
    Pooled, SqueezeExcite, Tied, WeightNorm, Unused, Scaled, GatheredHead, InterleavedHead)}  # fmt: skip


def build(kind):
    torch.manual_seed(3)
    return kind().double()


def classify(model, x, labels):
    return F.cross_entropy(model(x), labels)


def with_l2(model, x, labels):
    return classify(model, x, labels) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())


def labels_for(y_is_plain, grid):
    return LABELS if y_is_plain else dc.scatter(LABELS, grid)


def close(found, expected, name=""):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13, msg=lambda text: f"{name}: {text}")


def compare(model, reference):
    """Check gradients, parameters and buffers, on every rank."""
    for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is None:
            assert found.grad is None, name
        else:
            torch.testing.assert_close(
                found.grad, expected.grad, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}"
            )
        close(found, expected, name)
    for found, expected in zip(model.buffers(), reference.buffers(), strict=True):
        close(found, expected)


def gathered(kind):
    return issubclass(kind, (GatheredHead, InterleavedHead))


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", SCENARIOS)
def test_gradients_are_those_of_one_process(comm, name, parallel):
    kind = SCENARIOS[name]
    reference = build(kind)
    with_l2(reference, IMAGES, LABELS).backward()
    for grid in grids(comm, "nhw"):
        model = build(kind)
        if parallel:
            dc.parallelize(model, grid)
        with_l2(model, dc.scatter(IMAGES, grid), labels_for(gathered(kind), grid)).backward()
        compare(model, reference)


def test_replicas_do_not_count_twice(comm):
    reference = build(Pooled)
    classify(reference, IMAGES, LABELS).backward()
    grid = grid_over(comm, r=comm.size)
    model = dc.parallelize(build(Pooled), grid)
    classify(model, dc.scatter(IMAGES, grid), dc.scatter(LABELS, grid)).backward()
    compare(model, reference)


def test_three_steps_of_an_optimizer_with_momentum_are_those_of_one_process(comm):
    for grid in grids(comm, "nh"):
        model, reference = dc.parallelize(build(SqueezeExcite), grid), build(SqueezeExcite)
        for trained, place in ((model, lambda t, grid=grid: dc.scatter(t, grid)), (reference, lambda t: t)):
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
            for step in range(3):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                classify(trained, place(IMAGES + step), place(LABELS)).backward()
                optimizer.step()
        compare(model, reference)


@pytest.mark.parametrize("parallel", [True, False])
def test_two_backward_passes_add_up(comm, parallel):
    grid = grid_over(comm, h=comm.size)
    model, reference = build(Pooled), build(Pooled)
    if parallel:
        dc.parallelize(model, grid)
    for shift in (0, 1):
        classify(model, dc.scatter(IMAGES + shift, grid), dc.scatter(LABELS, grid)).backward()
        classify(reference, IMAGES + shift, LABELS).backward()
    compare(model, reference)


def test_one_graph_may_be_used_twice(comm):
    grid = grid_over(comm, h=comm.size)
    model, reference = dc.parallelize(build(Pooled), grid), build(Pooled)
    for loss in (
        classify(model, dc.scatter(IMAGES, grid), dc.scatter(LABELS, grid)),
        classify(reference, IMAGES, LABELS),
    ):
        loss.backward(retain_graph=True)
        loss.backward()
    compare(model, reference)


def test_hooks_on_parameters_see_whole_gradients(comm):
    grid = grid_over(comm, h=comm.size)
    seen = []
    for model, x, labels in (
        (build(Pooled), IMAGES, LABELS),
        (dc.parallelize(build(Pooled), grid), dc.scatter(IMAGES, grid), dc.scatter(LABELS, grid)),
    ):
        weight, bias = model.body.first.weight, model.head.bias
        weight.register_hook(lambda grad: seen.append(grad.clone()) or grad.clamp(-0.01, 0.01))
        bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        classify(model, x, labels).backward()
        seen.append(weight.grad.clone())
    assert len(seen) == 6
    for expected, found in zip(seen[:3], seen[3:], strict=True):
        close(found, expected)


def test_autograd_grad_is_whole_at_once_and_leaves_grad_alone(comm):
    grid = grid_over(comm, h=comm.size)
    model, reference = dc.parallelize(build(Tied), grid), build(Tied)
    expected = torch.autograd.grad(classify(reference, IMAGES, LABELS), list(reference.parameters()))
    loss = classify(model, dc.scatter(IMAGES, grid), dc.scatter(LABELS, grid))
    found = torch.autograd.grad(loss, list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    assert all(p.grad is None for p in model.parameters())


def test_backward_to_some_parameters_leaves_the_others_alone(comm):
    grid = grid_over(comm, h=comm.size)
    model, reference = dc.parallelize(build(Pooled), grid), build(Pooled)
    classify(reference, IMAGES, LABELS).backward(inputs=[reference.body.first.weight])
    loss = classify(model, dc.scatter(IMAGES, grid), dc.scatter(LABELS, grid))
    loss.backward(inputs=[model.body.first.weight])
    compare(model, reference)


def test_gradients_are_complete_when_backward_returns_however_many_buckets(comm, monkeypatch):
    monkeypatch.setattr(gradient_reduction, "BUCKET_BYTES", 100)
    grid = grid_over(comm, h=comm.size)
    model, reference = dc.parallelize(build(SqueezeExcite), grid), build(SqueezeExcite)
    classify(reference, IMAGES, LABELS).backward()
    classify(model, dc.scatter(IMAGES, grid), dc.scatter(LABELS, grid)).backward()
    compare(model, reference)


class Breaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("broken on purpose")


@pytest.mark.parametrize("bucket_bytes", [100, 4 << 20])
def test_a_backward_that_fails_leaves_nothing_behind(comm, monkeypatch, bucket_bytes):
    monkeypatch.setattr(gradient_reduction, "BUCKET_BYTES", bucket_bytes)
    grid = grid_over(comm, h=comm.size)
    model, reference = dc.parallelize(build(Pooled), grid), build(Pooled)
    x = dc.scatter(IMAGES, grid)
    broken = dc.DistTensor(Breaking.apply(x.local.clone().requires_grad_()), x.dist, x.shape)
    with pytest.raises(ArithmeticError, match="broken on purpose"):
        classify(model, broken, dc.scatter(LABELS, grid)).backward()
    model.zero_grad()
    model.load_state_dict(reference.state_dict())
    classify(reference, IMAGES, LABELS).backward()
    classify(model, x, dc.scatter(LABELS, grid)).backward()
    compare(model, reference)


def test_frozen_parameters_get_no_gradient(comm):
    grid = grid_over(comm, h=comm.size)
    model, reference = build(Pooled), build(Pooled)
    for each in (model, reference):
        each.body.first.requires_grad_(False)
    dc.parallelize(model, grid)
    classify(reference, IMAGES, LABELS).backward()
    classify(model, dc.scatter(IMAGES, grid), dc.scatter(LABELS, grid)).backward()
    compare(model, reference)


def test_a_plain_tensor_is_owed_the_whole_gradient_too(comm):
    for grid in grids(comm, "nhw"):
        x, mask = dc.scatter(IMAGES, grid), normal(2, 1, 9, seed=5).requires_grad_()
        (x * mask).sum().backward()
        torch.testing.assert_close(mask.grad, IMAGES.sum((0, 2), keepdim=True)[0], rtol=1e-12, atol=1e-13)


def test_it_returns_the_same_module(comm):
    model = build(Pooled)
    keys = list(model.state_dict())
    assert dc.parallelize(model, grid_over(comm, h=comm.size)) is model
    assert list(model.state_dict()) == keys


def test_a_deep_copy_of_a_parallel_model_trains_as_exactly(comm):
    grid = grid_over(comm, h=comm.size)
    model, reference = copy.deepcopy(dc.parallelize(build(Pooled), grid)), build(Pooled)
    classify(reference, IMAGES, LABELS).backward()
    classify(model, dc.scatter(IMAGES, grid), dc.scatter(LABELS, grid)).backward()
    compare(model, reference)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("name", ["body.second.weight", "body.norm.running_mean"])
def test_parameters_and_buffers_that_differ_are_found(comm, name):
    model = build(Pooled)
    if comm.rank == comm.size - 1:
        with torch.no_grad():
            model.state_dict()[name].view(-1)[0] += 1e-12
    text = raises_everywhere(
        comm, dc.MismatchError, "differ between ranks", lambda: dc.parallelize(model, grid_over(comm, h=comm.size))
    )
    assert repr(name) in text
    assert "broadcast=True" in text


def test_broadcast_gives_all_ranks_the_state_of_the_first(comm):
    torch.manual_seed(comm.rank)
    model = dc.parallelize(Pooled().double(), grid_over(comm, h=comm.size), broadcast=True)
    torch.manual_seed(0)
    expected = Pooled().double()
    for found, wanted in zip(model.state_dict().values(), expected.state_dict().values(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.ranks(at_least=2)
def test_different_models_are_a_mismatch(comm):
    model = build(Pooled if comm.rank else Tied)
    raises_everywhere(comm, dc.MismatchError, "Pooled", lambda: dc.parallelize(model, grid_over(comm, h=comm.size)))


def test_a_model_needs_a_grid(comm):
    raises_everywhere(
        comm, dc.UnsupportedOperation, "needs a ProcessGrid", lambda: dc.parallelize(build(Pooled), "h=2")
    )
