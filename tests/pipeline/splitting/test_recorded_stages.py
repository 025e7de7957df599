"""Stages of recorded models: what one process computes, for any number of samples and in any mode."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from distconv.layers.models import MODELS
from distconv.pipeline.splitting import split as split_module
from distconv.pipeline.splitting.graph_cuts import SplitError
from distconv.pipeline.splitting.recorded_stages import RecordedStage
from distconv.pipeline.splitting.split import possible_cuts, split
from tests.pipeline.splitting.idioms import IDIOMS, SHAPE, convolutions
from tests.pipeline.splitting.modules import model_of


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def never_by_fx(monkeypatch):
    monkeypatch.setattr(split_module, "trace_steps", refusing)


def refusing(model):
    raise SplitError("not by torch.fx")


def idiom(name):
    torch.manual_seed(0)
    return IDIOMS[name](), ["b", "c"]


def run_stages(stages, x):
    values = (x,)
    for stage in stages:
        returned = stage(*values)
        values = returned if isinstance(returned, tuple) else (returned,)
    return returned


def train(model, run, batches):
    """Everything that comes of some steps: outputs, weights and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step, x in enumerate(batches):
        torch.manual_seed(step)
        optimizer.zero_grad()
        outputs = tree_leaves(run(x))
        sum(output.square().mean() for output in outputs if isinstance(output, torch.Tensor)).backward()
        optimizer.step()
        found += outputs
    return [*found, *model.state_dict().values()]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # reentrant checkpoints without autograd
@pytest.mark.parametrize("name", IDIOMS)
def test_stages_train_and_evaluate_as_the_model_with_any_number_of_samples(name):
    model, cuts = idiom(name)
    alone, _ = idiom(name)
    stages = split(model, cuts, torch.zeros(2, *SHAPE))
    assert all(isinstance(stage, RecordedStage) for stage in stages)
    batches = [torch.randn(samples, *SHAPE) for samples in (3, 2, 1, 4)]
    assert_same(train(model, lambda x: run_stages(stages, x), batches), train(alone, alone, batches))
    model.eval()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.manual_seed(0)
            found = tree_leaves(run_stages(stages, batches[0]))
            torch.manual_seed(0)
            assert_same(found, tree_leaves(model(batches[0])))


def dropped(self, x):
    return self.c(F.dropout(self.b(F.dropout(self.a(x), 0.5, self.training)), 0.5, self.training))


def make_dropout_model(**more):
    torch.manual_seed(0)
    return model_of(dropped, **convolutions(), norm=nn.BatchNorm2d(4), **more)


def test_the_model_is_left_as_it_is():
    model, cuts = idiom("batch norms")
    model.norm.eval()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    split(model, cuts, torch.zeros(2, *SHAPE))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and not model.norm.training
    assert_same(list(model.state_dict().values()), list(before.values()))
    assert all(weight.grad is None for weight in model.parameters())


def test_modes_reach_the_stages_from_the_model_and_from_themselves():
    model = make_dropout_model()
    stages = split(model, ["b", "c"], torch.zeros(2, *SHAPE))
    x = torch.randn(3, *SHAPE)
    model.eval()
    assert torch.equal(run_stages(stages, x), model(x))
    model.train()
    torch.manual_seed(0)
    first = run_stages(stages, x)
    torch.manual_seed(0)
    assert torch.equal(first, model(x))
    for stage in stages:
        stage.eval()
    assert not model.training
    assert torch.equal(run_stages(stages, x), model(x))


def test_a_module_that_is_frozen_stays_so():
    torch.manual_seed(0)
    model = model_of(lambda self, x: self.c(self.norm(self.b(self.a(x)))) * len(x.shape), **convolutions())
    model.norm = nn.BatchNorm2d(4).eval()
    stages = split(model, ["b", "c"], torch.zeros(2, *SHAPE))
    assert torch.equal(run_stages(stages, x := torch.randn(2, *SHAPE)), model(x))
    assert not model.norm.running_mean.any()


def test_what_evaluation_does_not_call_is_no_cut_there():
    def forward(self, x):
        x = self.a(x)
        return self.c(self.b(x) if self.training else x)

    model = model_of(forward, **convolutions())
    stages = split(model, ["b", "c"], torch.zeros(2, *SHAPE))
    x = torch.randn(3, *SHAPE)
    assert torch.equal(run_stages(stages, x), model(x))
    model.eval()
    with pytest.raises(SplitError, match="cut 'b': no module of that name is called"):
        stages[0](x)


def test_stages_refuse_what_is_not_like_the_example():
    model, cuts = idiom("heads")
    stages = split(model, cuts, torch.zeros(2, *SHAPE))
    for x in (torch.zeros(2, 4, 6, 7), torch.zeros(2, *SHAPE, dtype=torch.float32)):
        with pytest.raises(SplitError, match=r"stage 0 received \(2, 4, 6, .*; with samples like the example's \(2,"):
            stages[0](x)
    with pytest.raises(SplitError, match="stage 1 received"):
        stages[1](torch.zeros(2, 4, 5, 6))


def test_a_reference_model_with_decisions_by_shapes_is_cut_anywhere():
    torch.manual_seed(0)
    model = MODELS["cosmoflow"](width=2)
    shape = (4, 16, 16, 16)
    example = torch.zeros(2, *shape)
    cuts = possible_cuts(model, example)
    assert len(split(model, cuts, example)) == len(cuts) + 1
    alone = copy.deepcopy(model)
    stages = split(model, [cuts[1], cuts[-1]], example)
    batches = [torch.randn(samples, *shape) for samples in (2, 1)]
    assert_same(train(model, lambda x: run_stages(stages, x), batches), train(alone, alone, batches))


def _written_behind(self, x):
    x = self.a(x)
    part = x[:, :2]
    y = self.b(x.clone())
    part.mul_(2)
    return self.c(x + y) * len(x.shape)


def test_memory_that_two_stages_would_share_is_refused_where_it_is_written():
    model = model_of(_written_behind, **convolutions())
    example = torch.zeros(2, *SHAPE)
    with pytest.raises(SplitError, match="share memory that is written after the cut from stage 0 to 1"):
        split(model, ["b"], example)
    stages = split(model, ["c"], example)
    x = torch.randn(3, *SHAPE)
    assert torch.equal(run_stages(stages, x), model(x))
