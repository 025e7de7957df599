"""When gradients are summed: at once or behind backward, in buckets, or by a later pass; always whole in the end."""

from __future__ import annotations

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


def both(comm, kind=Pooled, parallel=True):
    """A model, images and labels: in one process, then on a grid."""
    grid = grid_over(comm, h=comm.size)
    yield build(kind), IMAGES, LABELS
    model = dc.parallelize(build(kind), grid) if parallel else build(kind)
    yield model, dc.scatter(IMAGES, grid), dc.scatter(LABELS, grid)


def two_passes(model, x, labels):
    for shift in (0, 1):
        classify(model, x + shift, labels).backward()


def one_graph_twice(model, x, labels):
    loss = classify(model, x, labels)
    loss.backward(retain_graph=True)
    loss.backward()


def to_some_parameters(model, x, labels):
    classify(model, x, labels).backward(inputs=[model.body.first.weight])


def by_autograd_grad(model, x, labels):
    gradients = torch.autograd.grad(classify(model, x, labels), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is None
        parameter.grad = gradient


@pytest.mark.parametrize(
    ("passes", "alone_bytes"),
    [
        *((two_passes, alone_bytes) for alone_bytes in (0, 100, 1 << 20)),
        *((one_graph_twice, 0), (to_some_parameters, 100), (by_autograd_grad, 1 << 20)),
    ],
)
def test_gradients_are_complete_when_backward_returns_however_many_buckets(comm, monkeypatch, passes, alone_bytes):
    monkeypatch.setattr(gradient_reduction, "BUCKET_BYTES", 100)
    monkeypatch.setattr(gradient_reduction, "UNBUCKETED_BYTES", alone_bytes)
    for kind, parallel in ((Tied, True), (SqueezeExcite, True), (Pooled, False)):
        models = []
        for given in both(comm, kind, parallel):
            passes(*given)
            models.append(given[0])
        compare(*models[::-1])


def test_hooks_on_parameters_see_whole_gradients(comm):
    seen = []

    def stepped(parameter):
        # As an optimizer that steps in the backward pass: nothing is to come after it.
        seen.append(parameter.grad.clone())
        parameter.grad.zero_()

    for model, x, labels in both(comm):
        weight, bias, head = model.body.first.weight, model.head.bias, model.head.weight
        weight.register_hook(lambda grad: seen.append(grad.clone()) or grad.clamp(-0.01, 0.01))
        bias.register_post_accumulate_grad_hook(stepped)
        # A later layer has its full gradient by then.
        weight.register_post_accumulate_grad_hook(lambda _, head=head: seen.append(head.grad.clone()))
        classify(model, x, labels).backward()
        seen.append(weight.grad.clone())
        assert not bias.grad.any()
    assert len(seen) == 8
    for expected, found in zip(seen[:4], seen[4:], strict=True):
        same(found, expected)


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
