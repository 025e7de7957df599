"""Models that only a run with an example could cut, trained over ranks: the numbers of one process."""

from __future__ import annotations

import importlib
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.pipeline import Pipeline, PipelinePlan, SerialPipeline, split
from tests.distconv.layouts import normal
from tests.layers.models.third_party_networks import need, torchvision
from tests.pipeline.splitting.idioms import IDIOMS, SHAPE, convolutions
from tests.pipeline.splitting.modules import model_of
from tests.pipeline.training import SGD, assert_close, assert_same, copies, train_plainly

LAYERS = ["number of dimensions", "batch norms", "an own function", "a moving average", "called twice", "heads"]
CUTS = ["layers.1.c", "layers.3.b"]
"""Inside of a network that has all of ``LAYERS``, one behind the other."""

EXAMPLE = torch.empty(2, *SHAPE, dtype=torch.float64)


def network(names=LAYERS):
    torch.manual_seed(0)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    return model_of(forward, layers=nn.ModuleList(IDIOMS[name]() for name in names)).double()


def loss(output, target):
    return (output.flatten(1).mean(1) - target).square().mean()


def data(*sizes):
    return [(normal(size, *SHAPE, seed=size), normal(size, seed=9 + size)) for size in sizes]


@pytest.mark.fault(27)
@pytest.mark.ranks(3)
@pytest.mark.parametrize("schedule", ["1f1b-so", "zero-bubble"])
def test_a_recorded_model_trains_as_one_process_with_micro_batches_of_any_size(comm, schedule):
    alone, model = network(), network()
    batches = data(5, 3, 4)
    pipe = Pipeline(split(model, CUTS, EXAMPLE), comm, schedule, loss, 3, optimizer=SGD)
    assert [pipe.step(*batch) for batch in batches] == train_plainly([alone], batches, 3, loss)
    pipe.synchronize()
    assert_same([model], [alone])
    pipe.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("schedule", ["1f1b-so", "stale", "pipedream"])
def test_a_recorded_model_draws_the_random_numbers_of_the_serial_pipeline(comm, schedule):
    layers = ["functional dropout", "random draws", "checkpointed", "modules on the fly"]
    stages = split(network(layers), ["layers.1.b", "layers.2.c"], EXAMPLE)
    serial = copies(stages)
    microbatches = 2 if schedule == "1f1b-so" else 1
    alone = SerialPipeline(serial, loss, SGD, "gpipe" if microbatches > 1 else schedule, microbatches)
    pipe = Pipeline(stages, comm, schedule, loss, microbatches, optimizer=SGD)
    batches = data(4, 3, 2)
    assert [pipe.step(*batch) for batch in batches] == [alone.step(*batch) for batch in batches]
    pipe.drain()
    alone.drain()
    pipe.synchronize()
    assert_same(stages, serial)
    pipe.close()


def normalised(self, x):
    x = self.norm(self.a(x)) if len(x.shape) == 4 else x
    return self.c(torch.relu(self.b(x)) + x.mean((2, 3), keepdim=True))


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


def normed():
    torch.manual_seed(0)
    return model_of(normalised, **convolutions(), norm=OwnNorm(4)).double()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("plan", [{"h": 2}, dc.Plan({"*": {"h": 2}, "b": {"n": 2}}, 2)])
def test_a_stage_of_a_recorded_model_over_two_ranks(comm, plan):
    alone, model, batches = normed(), normed(), data(4, 3, 2)
    plans = PipelinePlan("normed", 4, 3, ("c",), (1, 1), (plan, None), "gpipe", 2)
    pipe = Pipeline.from_plan(plans, model, comm, loss, SGD, example=EXAMPLE)
    found = [pipe.step(*batch) for batch in batches]
    assert found == pytest.approx(train_plainly([alone], batches, 2, loss), rel=1e-10)
    pipe.synchronize()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-10, atol=1e-12)
    pipe.close()


@pytest.mark.ranks(3)
def test_replicas_bring_the_statistics_of_a_recorded_models_batch_norms_together(comm):
    alone, model, batches = normed(), normed(), data(4, 3)
    pipe = Pipeline(split(model, ["c"], EXAMPLE), comm, "gpipe", loss, 3, (2, 1), SGD)
    for batch in batches:
        pipe.step(*batch)
    pipe.synchronize()
    train_plainly([alone], batches, 3, loss)
    assert_close([model], [alone])
    pipe.close()


@pytest.mark.long
@pytest.mark.ranks(2, 3)
def test_an_unmodified_gpt_2_with_a_tied_embedding_trains_and_predicts_as_in_one_process(comm):
    need("transformers")
    torchvision()  # transformers imports it
    # In a checkout our folder kernels is found where transformers looks for the package of this name.
    sys.modules.setdefault("kernels", None)
    package = importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2}
    settings = {"bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "eager", "use_cache": False}
    dropout = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    model = package.GPT2LMHeadModel(package.GPT2Config(**sizes, **settings, **dropout)).double()
    alone, words = copies(model), torch.randint(50, (6, 16))
    batch = {"input_ids": words, "attention_mask": torch.ones(6, 16, dtype=torch.int64)}
    batch["attention_mask"][1, :3] = 0

    def loss(output, target):
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())

    cuts = {2: ["transformer.h.2.ln_1"], 3: ["transformer.h.1.ln_1", "transformer.h.3.ln_1"]}[comm.size]
    optimizer = partial(torch.optim.AdamW, lr=0.01)
    stages = split(model, cuts, {name: value[:3] for name, value in batch.items()})
    with Pipeline(stages, comm, "1f1b-so", loss, microbatches=2, optimizer=optimizer) as pipe:
        losses = [pipe.step(batch, words) for _ in range(3)]
        predicted = pipe.predict(batch)
        pipe.synchronize()
    updates, expected = optimizer(alone.parameters()), []
    for _ in range(3):
        updates.zero_grad()
        each = loss(alone(**batch), words)
        each.backward()
        updates.step()
        expected.append(each.item())
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0.0)
    assert_close([model], [alone])
    with torch.no_grad():
        torch.testing.assert_close(predicted.logits, alone.eval()(**batch).logits, rtol=1e-10, atol=1e-12)
