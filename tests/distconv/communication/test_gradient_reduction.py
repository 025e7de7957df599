"""When gradients are summed: at once or behind backward, in buckets, or by a later pass; always whole in the end."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.communication import gradient_reduction
from tests.distconv.layouts import grid_over, grids, normal
from tests.distconv.parameters.bench import Bench, as_in_one_process, whole_gradients
from tests.distconv.small_models import IMAGES, LABELS, Pooled, SqueezeExcite, Tied, build, classify, compare, same
from tests.layers.compare import close


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


def both(comm):
    """A model, images and labels: in one process, then on a grid."""
    grid = grid_over(comm, h=comm.size)
    yield build(Pooled), IMAGES, LABELS
    yield dc.parallelize(build(Pooled), grid), dc.scatter(IMAGES, grid), dc.scatter(LABELS, grid)


def test_hooks_on_parameters_see_whole_gradients(comm):
    seen = []
    for model, x, labels in both(comm):
        weight, bias = model.body.first.weight, model.head.bias
        weight.register_hook(lambda grad: seen.append(grad.clone()) or grad.clamp(-0.01, 0.01))
        bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        classify(model, x, labels).backward()
        seen.append(weight.grad.clone())
    assert len(seen) == 6
    for expected, found in zip(seen[:3], seen[3:], strict=True):
        same(found, expected)


@pytest.mark.parametrize("name", ["body.first.weight", "head.weight", "head.bias"])
def test_a_hook_behind_the_sum_alone_sees_whole_gradients_too(comm, name):
    seen = []

    def taken(parameter):
        # As an optimizer that steps in the backward pass: nothing is to come after it.
        seen.append(parameter.grad.clone())
        parameter.grad.zero_()

    for model, x, labels in both(comm):
        parameter = model.get_parameter(name)
        parameter.register_post_accumulate_grad_hook(taken)
        classify(model, x, labels).backward()
        assert not parameter.grad.any()
    assert len(seen) == 2
    same(seen[1], seen[0])


def test_a_hook_of_one_parameter_sees_the_full_gradients_of_later_layers(comm):
    seen = []
    for model, x, labels in both(comm):
        weight, head = model.body.first.weight, model.head.weight
        weight.register_post_accumulate_grad_hook(lambda _, head=head: seen.append(head.grad.clone()))
        for _ in range(2):
            classify(model, x, labels).backward()
    assert len(seen) == 4
    for expected, found in zip(seen[:2], seen[2:], strict=True):
        same(found, expected)


def test_autograd_grad_is_whole_at_once_and_leaves_grad_alone(comm):
    grid = grid_over(comm, h=comm.size)
    model, reference = dc.parallelize(build(Tied), grid), build(Tied)
    expected = torch.autograd.grad(classify(reference, IMAGES, LABELS), list(reference.parameters()))
    loss = classify(model, dc.scatter(IMAGES, grid), dc.scatter(LABELS, grid))
    found = torch.autograd.grad(loss, list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        same(one, other)
    assert all(p.grad is None for p in model.parameters())


def test_backward_to_some_parameters_leaves_the_others_alone(comm):
    grid = grid_over(comm, h=comm.size)
    model, reference = dc.parallelize(build(Pooled), grid), build(Pooled)
    classify(reference, IMAGES, LABELS).backward(inputs=[reference.body.first.weight])
    loss = classify(model, dc.scatter(IMAGES, grid), dc.scatter(LABELS, grid))
    loss.backward(inputs=[model.body.first.weight])
    compare(model, reference)


@pytest.mark.parametrize("alone_bytes", [0, 100, 1 << 20])
def test_gradients_are_complete_when_backward_returns_however_many_buckets(comm, monkeypatch, alone_bytes):
    monkeypatch.setattr(gradient_reduction, "BUCKET_BYTES", 100)
    monkeypatch.setattr(gradient_reduction, "UNBUCKETED_BYTES", alone_bytes)
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


@pytest.mark.parametrize(("bucket_bytes", "alone_bytes"), [(100, 1 << 20), (4 << 20, 1 << 20), (4 << 20, 0)])
def test_a_backward_that_fails_leaves_nothing_behind(comm, monkeypatch, bucket_bytes, alone_bytes):
    monkeypatch.setattr(gradient_reduction, "BUCKET_BYTES", bucket_bytes)
    monkeypatch.setattr(gradient_reduction, "UNBUCKETED_BYTES", alone_bytes)
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


def test_a_plain_tensor_is_owed_the_whole_gradient_too(comm):
    for grid in grids(comm, "nhw"):
        x, mask = dc.scatter(IMAGES, grid), normal(2, 1, 9, seed=5).requires_grad_()
        (x * mask).sum().backward()
        torch.testing.assert_close(mask.grad, IMAGES.sum((0, 2), keepdim=True)[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.ranks(at_most=6)
def test_gradients_accumulate_without_sums_in_between(comm, set_to_none):
    def scenario(bench):
        with bench.no_sync():
            bench.loss(9).backward()
        bench.optimizer.zero_grad(set_to_none)
        for step in range(3):
            with bench.no_sync() if step < 2 else contextlib.nullcontext():
                bench.loss(step).backward()
        return whole_gradients(bench.model)

    as_in_one_process(comm, scenario)


@pytest.mark.ranks(at_most=6)
def test_parameters_that_the_last_pass_does_not_use_keep_what_was_accumulated(comm):
    def scenario(bench):
        with bench.no_sync():
            bench.loss(1).backward()
        x, label = bench.batch(2)
        F.cross_entropy(bench.model.begin(x).mean((2, 3))[:, :5], label).backward()
        return whole_gradients(bench.model)

    as_in_one_process(comm, scenario)


def scale(bench):
    for parameter in bench.model.parameters():
        parameter.grad.mul_(0.5)


def replace(bench):
    for parameter in bench.model.parameters():
        parameter.grad = parameter.grad * 0.5


def assign_plain(bench):
    for parameter in bench.model.parameters():
        parameter.grad = torch.full(parameter.shape, 0.1, dtype=parameter.dtype)


def clip(bench):
    bench.seen.append(dc.gather(torch.nn.utils.clip_grad_norm_(bench.model.parameters(), 0.1)))


def read(bench):
    bench.seen += [dc.gather(parameter.grad).clone() for parameter in bench.model.parameters()]


def step(bench):
    bench.optimizer.step()


def differentiate(bench):
    torch.autograd.grad(bench.loss(5), list(bench.model.parameters()))


def clear(bench):
    for parameter in bench.model.parameters():
        del parameter.grad


@pytest.mark.parametrize("between", [scale, replace, assign_plain, clip, read, step, differentiate, clear])
@pytest.mark.ranks(at_most=4)
def test_whoever_looks_between_passes_without_sums_finds_what_one_process_has(comm, between):
    def scenario(bench):
        bench.seen = []
        for number in range(3):
            with bench.no_sync():
                bench.loss(number).backward()
            between(bench)
        bench.optimizer.step()
        state = {name: dc.gather(value) for name, value in bench.model.state_dict().items()}
        return state | {f"seen {number}": value.detach() for number, value in enumerate(bench.seen)}

    as_in_one_process(comm, scenario)


@pytest.mark.ranks(at_least=2, at_most=6)
def test_no_gradient_is_summed_within_no_sync(comm, monkeypatch):
    bench = Bench(grid_over(comm, n=comm.size))
    started, launch = [], gradient_reduction._Bucket.launch
    monkeypatch.setattr(
        gradient_reduction._Bucket, "launch", lambda bucket, *turn: started.append(bucket) or launch(bucket, *turn)
    )
    with dc.no_sync():
        bench.loss(1).backward()
        with dc.no_sync():
            bench.loss(2).backward()
        bench.loss(3).backward()
    assert not started
    assert all(parameter.grad is not None for parameter in bench.model.parameters())
    assert started
    assert "grad" not in vars(torch.nn.Parameter)  # nothing is kept any more


@pytest.mark.ranks(at_least=2, at_most=6)
def test_a_model_that_only_some_ranks_still_have_does_not_part_them(comm):
    # Python frees what is in a circle whenever it collects, which is not the same on all ranks.
    bench = Bench(grid_over(comm, n=comm.size))
    with dc.no_sync():
        bench.loss(1).backward()
    if comm.rank:
        del bench
        gc.collect()
    after = Bench(grid_over(comm, n=comm.size))
    after.loss(1).backward()
    alone = Bench(None)
    alone.loss(1).backward()
    expected = dict(alone.model.named_parameters())
    for name, parameter in after.model.named_parameters():
        close(parameter.grad, expected[name].grad, name)


def test_what_is_kept_is_no_memory_of_others(comm):
    leaf, share = torch.nn.Parameter(torch.zeros(3)), torch.full((3,), comm.rank + 1.0)
    gradient_reduction.defer_grad_reduction(leaf, "leaf")
    with dc.no_sync():
        gradient_reduction.enqueue_contribution(leaf, share, comm, uniquely_owned=False)
        share.zero_()
    assert torch.equal(leaf.grad, torch.full((3,), comm.size * (comm.size + 1.0) / 2))


def test_parameters_of_several_dtypes_get_gradients_of_their_own(comm):
    grid = grid_over(comm, n=comm.size)
    found = []
    for target in (None, grid):
        torch.manual_seed(1)
        model = torch.nn.ModuleList([torch.nn.Linear(3, 4).double(), torch.nn.Linear(4, 2)])
        x = normal(6, 3)
        if target is not None:
            dc.parallelize(model, target)
            x = dc.scatter(x, target)
        model[1](model[0](x).float()).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*found[::-1], strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
