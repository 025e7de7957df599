"""Steps that put tensors into attributes, variables and containers: as eagerly, or refused."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

import distconv as dc
from distconv.capture.step.independence import dependence, forget, unfitting
from distconv.capture.step.run import recorded
from distconv.capture.watch.references import References
from tests.distconv.capture.trained import batches, both, equal, network, step_of
from tests.distconv.layouts import grids, raises_everywhere


class Net(nn.Module):
    """Its forward pass calls ``put`` with itself, its output and its input."""

    def __init__(self, put):
        super().__init__()
        self.put, self.last, self.features, self.kept, self.calls = put, None, {}, [], 0

    def forward(self, x):
        y = x * 2
        self.put(self, y, x)
        return y + 1


def examined(put, rounds=2):
    """A run of a step with a module that does ``put``, the module, and how the step depends on what it sets."""
    model, x = Net(put), torch.ones(3)

    def step(x):
        return model(x)

    references = References(step)
    again = partial(recorded, step, (x,), references)
    for _ in range(rounds):
        run = again()
    return run, model, dependence(run, again, bool)


def test_what_does_not_depend_on_what_was_there_is_free():
    def put(self, y, x):
        self.last, self.features["y"], self.kept[:], self.size = (y, 1), y, [x, "x"], x.shape

    run, model, text = examined(put)
    assert text == ""
    assert [place.free for place, _ in run.puts] == [True] * 4
    assert (model.last, model.features, model.kept) == (None, {}, [])
    model.last = model.features["y"] = "anything"
    assert not list(unfitting(run))


@pytest.mark.parametrize(
    ("put", "words"),
    [
        (lambda self, y, x: setattr(self, "calls", self.calls + 1), "sets Net.calls, to something else each time"),
        (lambda self, y, x: self.kept.append(y), "sets Net.kept, to something else each time"),
        (lambda self, y, x: setattr(self, "last", object()), "sets Net.last, to something else each time"),
        (
            lambda self, y, x: setattr(self, "last", y if self.last is None else y + self.last),
            "Net.last, and depends on",
        ),
        (lambda self, y, x: setattr(self, "last", y if self.last is None else y * 3), "Net.last, and depends on"),
        (lambda self, y, x: self.features.setdefault("y", y), "sets Net.features['y'], but not each time: take a step"),
    ],
)
def test_what_depends_on_what_was_there_is_told(put, words):
    assert words in examined(put)[2]


def test_what_depends_on_shapes_alone_is_kept_to_them():
    def put(self, y, x):
        again = self.last is not None and self.last.shape != y.shape
        self.last = y * 3 if again else y

    run, model, text = examined(put)
    assert text == ""
    assert not list(unfitting(run))  # it is None, as it was before
    model.last = torch.zeros(3)
    assert not list(unfitting(run))
    for other in (torch.zeros(4), torch.zeros(3, dtype=torch.float64), [torch.zeros(3)], 0):
        model.last = other
        assert [place.name for place in unfitting(run)] == ["Net.last"]


def test_numbers_that_are_set_once_stay():
    def put(self, y, x):
        self.last = (x.shape[0], "rows") if self.last is None else self.last

    run, model, text = examined(put)
    assert text == ""
    for value, count in ((None, 0), ((3, "rows"), 0), ((4, "rows"), 1)):
        model.last = value
        assert len(list(unfitting(run))) == count


def test_a_pass_that_fails_on_other_tensors_depends_on_them():
    def put(self, y, x):
        assert self.last is None or self.last.dim() == 1, "of rows"
        assert self.last is None or len(self.last) == 3, "of three"
        self.last = y

    run, _, text = examined(put)
    assert text == ""
    assert not run.puts[0][0].free


def test_what_was_there_is_not_held():
    run, _, _ = examined(lambda self, y, x: setattr(self, "last", y))
    old = torch.zeros(3)
    place = run.puts[0][0]
    place.before, gone = old, weakref.ref(old)
    forget(run)
    del old
    gc.collect()
    assert gone() is None
    assert not list(unfitting(run))


ACTIVATIONS: dict[str, torch.Tensor] = {}


class Holder:
    __slots__ = ("last",)


HOLDER = Holder()


def _conv(model):
    return next(module for module in model.modules() if isinstance(module, nn.Conv2d))


def _hooked(model):
    """As activations are taken from networks, mostly."""

    def hook(name):
        def note(module, args, output):
            ACTIVATIONS[name] = output.detach()
            HOLDER.last = (output, name)

        return note

    _conv(model).register_forward_hook(hook("conv"))
    return lambda: [ACTIVATIONS["conv"].local, HOLDER.last[0].local]


def _appending(model):
    features = []
    _conv(model).register_forward_pre_hook(lambda *_: features.clear())
    _conv(model).register_forward_hook(lambda module, args, output: features.extend([args[0], {"y": output}]))
    return lambda: [features[0].local, features[1]["y"].local]


def _variable(model):
    last = None

    def note(module, args, output):
        nonlocal last
        last = output

    model.register_forward_hook(note)
    return lambda: [last.local]


def _normalised(model):
    spectral_norm(_conv(model))
    return lambda: [_conv(model).weight]


def _weight_normalised(model):
    weight_norm(_conv(model))
    return lambda: [_conv(model).weight]


def _pruned(model):
    prune.l1_unstructured(_conv(model), "weight", amount=0.3)
    return lambda: [_conv(model).weight]


@pytest.mark.ranks(2)
@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("keeping", [_hooked, _appending, _variable, _normalised, _weight_normalised, _pruned])
@pytest.mark.parametrize("check", [True, False])
def test_what_a_network_keeps_is_what_it_keeps_eagerly(comm, keeping, check):
    """With a pass of another batch between the steps, too."""
    for grid in grids(comm, "nhc"):
        check_what_is_kept(grid, keeping, check=check)


def check_what_is_kept(grid, keeping, **options):
    (other, _), *_ = batches(grid, 1, shape=(2, 2, 5, 8), seed=9)
    models = []

    def build():
        HOLDER.last = None
        ACTIVATIONS.clear()
        model = network()
        models.append((model, keeping(model)))
        return model

    def call(step, x, t):
        model, kept = models[-1]
        loss = step(x, t)
        blocks = [getattr(each, "local", each).detach().clone() for each in kept()]
        with torch.no_grad():
            model(other)
        return [loss, *(SimpleNamespace(local=block) for block in blocks)]

    both(grid, step_of, call, build=build, **options)


def test_a_step_that_is_refused_is_not_run_with_other_things():
    model, calls = Net(lambda self, y, x: setattr(self, "last", y.to_sparse())), []
    with pytest.raises(dc.CaptureError, match="sparse"):
        dc.capture(lambda x: calls.append(1) or model(x), torch.ones(3))
    assert len(calls) <= 4


@pytest.mark.ranks(2, 3)
@pytest.mark.cpu
def test_ranks_may_keep_other_things(comm):
    grid = grids(comm, "n")[0]
    model = dc.parallelize(Net(lambda self, y, x: comm.rank or setattr(self, "last", y)), grid)
    (x, _), (other, _) = batches(grid, 2)
    taken = dc.capture(lambda x: model(x), x)
    for given in (x, other):
        taken(given)
        if comm.rank == 0:
            equal([model.last.local], [given.local * 2])
        else:
            assert model.last is None
    if comm.rank == 0:
        model.last = None
    taken(x)
    carrying = dc.parallelize(Net(lambda self, y, x: setattr(self, "last", y if self.last is None else y + 1)), grid)
    raises_everywhere(comm, dc.CaptureError, "and depends on what was", lambda: dc.capture(lambda x: carrying(x), x))
