"""Stages compute what the model does, bit for bit; what cannot be cut is refused with a reason."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from distconv.errors import ShapeError
from distconv.layers.models import MODELS
from distconv.pipeline.splitting.graph_cuts import SplitError
from distconv.pipeline.splitting.split import possible_cuts, split
from distconv.pipeline.stage.structures import call_arguments, split_samples
from distconv.plan import is_plannable_layer
from tests.pipeline.splitting.modules import linears, model_of

SAMPLES = {
    "alexnet": (3, 32, 32),
    "resnet20": (3, 9, 9),
    "resnet50": (3, 33, 33),
    "unet": (18, 17, 19),
}


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def layers(model):
    return sum(is_plannable_layer(module) for module in model.modules())


def run_stages(stages, x):
    values = (x,)
    for stage in stages:
        returned = stage(*values)
        values = returned if isinstance(returned, tuple) else (returned,)
    return values[0]


def called_modules(stage):
    """The names of the modules that a stage calls."""
    return [node.target for node in stage.graph.nodes if node.op == "call_module"]


def train(model, run, x):
    """Output, gradients and buffers after one pass."""
    torch.manual_seed(0)
    output = run(x)
    output.square().sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return {"output": output, **gradients, **dict(model.named_buffers())}


def assert_stages_equal_model(model, cuts, x):
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    stages = split(other, cuts)
    assert len(stages) == len(cuts) + 1
    found, expected = train(other, lambda x: run_stages(stages, x), x), train(one, one, x)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


class Residual(nn.Module):
    """y = last(third(second(a)) + a + first(x)), where a = first(x): one value lives across two cuts."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(3, 3) for _ in range(4))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        a = torch.relu(self.first(x))
        return self.last(self.third(self.norm(self.second(a))) + a)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_reference_model_cut_once_twice_or_everywhere_computes_the_same(name):
    model = MODELS[name](width=4)
    last = layers(model) - 1
    x = torch.randn(2, *SAMPLES[name])
    for cuts in ([2], [1, last], [last // 2, last // 2 + 1], list(range(1, last + 1))):
        assert_stages_equal_model(model, cuts, x)


@pytest.mark.parametrize("cuts", [["layer1"], ["layer2.0", "layer3.2.conv2"], ["layer1.1.bn1", "fc"]])
def test_a_name_begins_the_next_stage(cuts):
    model = MODELS["resnet20"](width=4)
    assert_stages_equal_model(model, cuts, torch.randn(2, 3, 9, 9))
    for stage, name in zip(split(model, cuts)[1:], cuts, strict=True):
        assert called_modules(stage)[0].startswith(name)


def test_what_follows_a_layer_belongs_to_its_stage():
    first, second = split(MODELS["resnet20"](width=4), [2])
    assert called_modules(first)[-1] == "layer1.0.bn1"
    assert called_modules(second)[0] == "layer1.0.conv2"


def test_a_value_that_is_passed_on_is_the_same_object():
    stages = split(Residual(), ["second", "norm", "third"])
    a = torch.randn(2, 3)
    h, relayed = stages[1](a)
    assert relayed is a
    _, relayed = stages[2](h, a)
    assert relayed is a


def test_stages_hold_the_models_own_parameters_buffers_and_modules():
    model = Residual()
    stages = split(model, [2])
    for kind in ("named_parameters", "named_buffers"):
        of_stages = {name: tensor for stage in stages for name, tensor in getattr(stage, kind)()}
        of_model = dict(getattr(model, kind)())
        assert of_stages.keys() == of_model.keys()
        assert all(of_stages[name] is of_model[name] for name in of_model)
    assert stages[0].norm is model.norm
    assert {name for stage in stages for name in stage.state_dict()} == set(model.state_dict())


def test_a_parameter_a_buffer_and_a_constant_of_forward_itself_are_kept():
    def forward(self, x):
        return self.b(self.a(x) * self.scale + torch.tensor([1.0, 2.0, 3.0])) + self.shift

    model = model_of(forward, **linears("a", "b"), scale=nn.Parameter(torch.randn(3)), shift=torch.randn(3))
    assert_stages_equal_model(model, [1], torch.randn(2, 3))
    stages = split(model, ["b"])
    assert stages[0].scale is model.scale
    assert stages[1].shift is model.shift
    assert {name for stage in stages for name in stage.state_dict()} == set(model.state_dict())
    assert set(dict(model.named_buffers())) == {"shift"}


def test_train_and_eval_of_a_stage_reach_its_modules():
    model = Residual()
    stages = split(model, [2])
    stages[0].eval()
    assert not model.norm.training
    stages[0].train()
    assert model.norm.training


def test_the_modes_of_modules_are_left_as_they_are():
    model = Residual().train()
    model.norm.eval()
    split(model, [2])
    assert model.training
    assert not model.norm.training


def test_a_sequential_model_is_sliced_at_its_children():
    untraceable = model_of(lambda self, x: x if x.sum() > 0 else -x)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), untraceable, nn.Linear(3, 3))
    for cuts in (["3"], [1]):
        first, second = split(model, cuts)
        assert type(first) is type(second) is nn.Sequential
        assert list(first) == list(model)[:3]
        assert second.state_dict().keys() == {"3.weight", "3.bias"}
        assert_stages_equal_model(model, cuts, torch.randn(2, 3))


def test_a_sequential_model_is_traced_where_a_cut_is_inside_a_child():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)))
    for cuts in (["1.2"], [2], [1, 2]):
        assert_stages_equal_model(model, cuts, torch.randn(2, 3))


def test_without_a_cut_the_model_is_the_stage():
    model = Residual()
    assert split(model, []) == [model]


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (["frist"], "cut 'frist': no module of that name is called; there are first, second, norm, third, last"),
        (["third", "second"], r"cuts \['third', 'second'\]: 'second' comes before 'third'"),
        ([3, 2], r"cuts \[3, 2\]: 2 comes before 3"),
        ([2, 2], r"cuts \[2, 2\] leave stage 1 of 3 empty"),
        (["first"], r"leave stage 0 of 2 empty"),
        ([0], r"cut 0: .* layers 1 to 3 of 4 \(1 first, 2 second, 3 third, 4 last\)"),
        ([4], "cut 4: a register must come after one of the layers 1 to 3 of 4"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(cuts, message):
    with pytest.raises(SplitError, match=message):
        split(Residual(), cuts)


@pytest.mark.parametrize(
    ("forward", "cuts"),
    [
        (lambda self, x: self.a(self.b(self.a(x))), ["b"]),
        (lambda self, x: nn.functional.linear(self.b(self.a(x)), self.a.weight), ["b"]),
        (lambda self, x: self.b(self.a(x)).view(x.size(0), -1) * x.size(-1), ["b"]),
        (lambda self, x: sum(self.b(part) for part in [self.a(x)[:, :3].chunk(1, 1)[0]]), ["b"]),
    ],
    ids=["tied module", "tied parameter", "numbers", "tuple"],
)
def test_stages_share_parameters_and_exchange_numbers(forward, cuts):
    torch.manual_seed(0)
    assert_stages_equal_model(model_of(forward, **linears("a", "b")), cuts, torch.randn(2, 3))


def test_tied_modules_of_a_sequential_model_are_in_both_stages():
    torch.manual_seed(0)
    tied = nn.Linear(3, 3)
    model = nn.Sequential(tied, nn.ReLU(), tied)
    first, second = split(model, [1])
    assert next(first.parameters()) is next(second.parameters()) is tied.weight
    assert_stages_equal_model(model, [1], torch.randn(2, 3))


class Several(nn.Module):
    """Several inputs, by position and by name, and a result with names."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, mask=None, *, scale=1.0, extra=None):
        y = self.a(x) * scale
        y = self.b(y if mask is None else y * mask)
        if extra is not None:
            y = y + extra["shift"]
        return {"y": self.c(y), "rows": len(x)}


@pytest.mark.parametrize("cuts", [["b"], ["c"], ["b", "c"]])
@pytest.mark.parametrize(
    "given",
    [
        (torch.ones(4, 3), torch.tensor([[0.0], [1.0], [1.0], [2.0]])),
        {"x": torch.ones(4, 3), "scale": 0.5},
        {"x": torch.ones(4, 3), "mask": torch.ones(4, 1), "extra": {"shift": torch.full((4, 3), 2.0)}},
    ],
    ids=["positions", "names and a constant", "nested"],
)
def test_a_model_with_several_inputs_is_split_with_an_example_of_them(given, cuts):
    torch.manual_seed(0)
    model = Several().float()
    stages = split(model, cuts, given)
    for rows in (4, 2):  # another number of samples is recorded again
        value = split_samples(given, 4 // rows)[-1]
        args, kwargs = call_arguments(model, value)
        expected = model(*args, **kwargs)
        for stage in stages:
            args, kwargs = call_arguments(stage, value)
            value = stage(*args, **kwargs)
        assert torch.equal(value["y"], expected["y"]) and value["rows"] == expected["rows"] == rows


def test_an_input_unlike_the_example_raises():
    torch.manual_seed(0)
    first, _ = split(Several().float(), ["b"], {"x": torch.ones(4, 3), "scale": 0.5})
    for other in ({"x": torch.ones(4, 3), "scale": 2.0}, {"x": torch.ones(4, 3)}):
        with pytest.raises(SplitError, match="stage 0 received other containers, names or constants than the example"):
            first(**other)
    with pytest.raises(ShapeError, match=r"example\['x'\]|example\[0\] \(4, 3\), example\[1\] \(3, 1\)"):
        split(Several(), ["b"], (torch.ones(4, 3), torch.ones(3, 1)))


def test_hooks_that_would_be_lost_are_refused_and_those_of_a_layer_are_called():
    model, seen = Residual(), []
    model.second.register_forward_hook(lambda module, inputs, output: seen.append(output))
    assert_stages_equal_model(model, [2], torch.randn(2, 3))
    for hooked in (model, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))):
        hooked.register_forward_hook(lambda module, inputs, output: seen.append(output))
        with pytest.raises(SplitError, match="it has hooks"):
            split(hooked, [1])


# --- Possible cuts ---


def test_what_split_refuses_is_no_possible_cut():
    cuts = possible_cuts(MODELS["resnet20"](width=2))
    assert "layer2.0.conv2" in cuts and "fc" in cuts
    assert not any("relu" in cut for cut in cuts)  # called twice in each block
    assert "conv1" not in cuts  # nothing is before it


class Shared(nn.Module):
    """One weight in its first and third layer, and a number that is no tensor between the last two."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(3, 3) for _ in range(5))
        self.c.weight = self.a.weight

    def forward(self, x):
        x = self.c(self.b(self.a(x)))
        size = x.size(0)
        return self.e(self.d(x)) / size


def test_cuts_between_the_uses_of_a_weight_or_a_number_are_possible_and_of_a_buffer_not():
    assert possible_cuts(Shared()) == ["b", "c", "d", "e"]
    model = model_of(
        lambda self, x: self.c(self.norm(self.b(self.norm(self.a(x))))),
        norm=nn.BatchNorm1d(3),
        **linears("a", "b", "c"),
    )
    assert possible_cuts(model) == ["c"]


def test_of_modules_that_begin_together_the_innermost_is_a_cut():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Sequential(nn.ReLU()), nn.Linear(2, 2)))
    assert possible_cuts(model) == ["1.0.0", "1.1"]
