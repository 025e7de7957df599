"""Pipeline plans as files, what they refuse, and pipelines that are made from them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from distconv.errors import PlanError
from distconv.pipeline import Pipeline, PipelinePlan, SplitError
from distconv.plan import Plan
from tests.pipeline.runtime.test_grids import SGD, images, segmentation
from tests.pipeline.training import Chain, states, train_plainly

PLAN = PipelinePlan(
    model="segmentation",
    batch=4,
    ranks=6,
    cuts=("stages.1",),
    replicas=(2, 1),
    plans=(Plan({"*": {"h": 2}, "stages.0.0": {"n": 2}}, 2), {"w": 2}),
    schedule="1f1b-so",
    microbatches=4,
)


def test_a_saved_plan_is_loaded_as_it_was(tmp_path):
    local = (Plan({"*": {"h": 2}}, 2, batch_norm="local"), PLAN.plans[1])
    for plan in (
        PLAN,
        replace(PLAN, plans=local),
        replace(PLAN, ranks=3, plans=(None, None), schedule="gpipe", weights="recompute"),
        replace(PLAN, kinds=("old",) * 4 + ("new",) * 2),
    ):
        plan.save(tmp_path / "plan.json")
        assert PipelinePlan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kinds": ("old", "new")}, "kinds of 2 ranks, but ranks=6"),
        ({"kinds": (1,) * 6}, "kinds: 1 must be the name of a kind of device"),
        ({"ranks": 5}, r"need 6 ranks \(replicas \[2, 1\] of \[2, 2\] ranks\), but ranks=5"),
        ({"replicas": (1,)}, "1 replicas, but 2 plans"),
        ({"cuts": ()}, "0 cuts make 1 parts, but 2 stages of 1f1b-so need 2"),
        ({"cuts": (7,)}, "cuts: 7 must be the name of a submodule"),
        ({"schedule": "interleaved"}, "1 cuts make 2 parts, but 2 stages of interleaved need 4"),
        ({"schedule": "fast"}, "there is no schedule 'fast'"),
        ({"schedule": "fbp-as"}, "fbp-as can be simulated, not run"),
        ({"schedule": "stale", "replicas": (1, 1), "ranks": 4}, "stale updates after .*, but microbatches=4"),
        ({"weights": "stash"}, "weights='stash' must be one of recompute"),
        ({"microbatches": 0}, "microbatches=0 must be a positive whole number"),
        ({"model": ""}, "model='' must be a name"),
        ({"plans": (Plan({"*": {"h": 2}}), None)}, r"plans\[0\] has layers, but no ranks"),
        ({"plans": ({"q": 2}, None)}, r"plans\[0\]: .*unknown axis 'q'"),
        ({"plans": ("h=2", None)}, r"plans\[0\]='h=2' is neither a Plan"),
    ],
)
def test_what_does_not_fit_each_other_is_refused(changes, words):
    with pytest.raises(PlanError, match=words):
        replace(PLAN, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "distconv-plan"}, "format: found 'distconv-plan', expected 'distconv-pipeline-plan'"),
        ({"version": 2}, "version: found 2, expected 1"),
        ({"stages": 3}, "stages=3, but there are 2 plans"),
        ({"more": 1}, "more: found an unknown key, expected .* microbatches, weights .and perhaps kinds"),
        ({"cuts": "stages.1"}, "cuts: found 'stages.1', expected a list"),
        ({"plans": [7, None]}, r"plans\[0\]: found 7, expected a mapping or null"),
        (
            {"plans": [{"layers": {"*": {"h": 2}}, "rank": 2}, None]},
            r"plans\[0\]: rank: found an unknown key, expected .* layers .and perhaps ranks",
        ),
        ({"plans": [{"layers": {}, "ranks": 2}, None]}, r"plans\[0\]: a plan needs at least one layer"),
        ({"ranks": 7}, "need 6 ranks .*, but ranks=7"),
    ],
)
def test_a_file_with_something_else_is_refused_with_its_name(tmp_path, changes, words):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(PLAN.to_json()) | changes))
    with pytest.raises(PlanError, match=words) as caught:
        PipelinePlan.load(path)
    assert str(path) in str(caught.value)


def test_each_micro_batch_has_a_sample():
    assert replace(PLAN, batch=4).microbatches == 4
    with pytest.raises(PlanError, match="4 micro-batches need as many samples, but batch=3"):
        replace(PLAN, batch=3)


def test_a_plan_for_something_else_names_both():
    with pytest.raises(PlanError, match="made for model='segmentation', found model='resnet20'"):
        PLAN.check_matches(model="resnet20", ranks=6)
    with pytest.raises(PlanError, match="made for batch=4, found batch=8"):
        PLAN.check_matches(batch=8)


@pytest.mark.ranks(2, 6)
def test_a_pipeline_of_a_plan_and_a_model_that_it_cuts_trains_as_one_process(comm):
    plan = PLAN if comm.size == 6 else replace(PLAN, ranks=2, plans=({"h": 2},), replicas=(1,), cuts=())
    alone, model = segmentation(2), Chain(segmentation(2))
    pipe = Pipeline.from_plan(plan, model, comm, F.cross_entropy, SGD)
    for batch in images(3):
        pipe.step(*batch)
    pipe.synchronize()
    expected = train_plainly(alone, images(3), 4, optimizer=SGD)
    assert [loss for _, loss in pipe.losses] == pytest.approx(expected, rel=1e-10)
    for name, value in states(alone).items():
        torch.testing.assert_close(model.state_dict()[f"stages.{name}"], value, rtol=1e-10, atol=1e-12)
    pipe.close()


@pytest.mark.ranks(2)
def test_a_plan_for_other_ranks_stages_or_cuts_is_refused_on_all_ranks(comm):
    def attempt(plan, model):
        return Pipeline.from_plan(plan, model, comm, F.cross_entropy)

    with pytest.raises(PlanError, match="made for ranks=6, found ranks=2"):
        attempt(PLAN, Chain(segmentation(2)))
    two = replace(PLAN, ranks=2, plans=(None, None), replicas=(1, 1))
    with pytest.raises(PlanError, match="made for 2 stages, but there are 3"):
        attempt(two, segmentation(3))
    with pytest.raises(SplitError, match=r"cut 'layer9': no module of that name"):
        attempt(replace(two, cuts=("layer9",)), Chain(segmentation(2)))
