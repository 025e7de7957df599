"""The tensors of state dicts are the parameters, also where those are sharded: changes pass both ways."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, raises_everywhere
from tests.distconv.parameters.bench import Bench, as_in_one_process

pytestmark = pytest.mark.ranks(at_most=6)


def train(bench, steps=1):
    for step in range(steps):
        bench.optimizer.zero_grad()
        bench.loss(step).backward()
        bench.optimizer.step()


def averaged_in_place(average, model):
    for name, value in average.state_dict().items():
        if value.is_floating_point():
            value *= 0.9
            value += 0.1 * model.state_dict()[name].detach()


def averaged_at_once(average, model):
    pairs = zip(average.state_dict().values(), model.state_dict().values(), strict=True)
    means, values = zip(*[(m, v) for m, v in pairs if m.is_floating_point()], strict=True)
    torch._foreach_lerp_(list(means), list(values), 0.1)


def averaged_by_copying(average, model):
    with torch.inference_mode():
        for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            mean.copy_(0.9 * mean + 0.1 * value)


@pytest.mark.parametrize(
    "update",
    [averaged_in_place, averaged_at_once, averaged_by_copying],
)
def test_moving_averages_written_into_a_state_dict(comm, update):
    def scenario(bench):
        average = copy.deepcopy(bench.model).requires_grad_(False)
        for _ in range(2):
            train(bench)
            update(average, bench.model)
        return average.state_dict() | {"loss": dc.gather(bench.loss(3, average))}

    as_in_one_process(comm, scenario)


def test_surgery_on_weights(comm):
    def scenario(bench):
        state = bench.model.state_dict()
        with torch.no_grad():
            state["first.weight"][0] = 1.0
            state["second.weight"].view(-1)[3] = 5.0
            state["second.bias"].data.fill_(0.5)
            state["up.weight"].detach()[1].mul_(2)
            torch.nn.init.constant_(state["head.weight"], 0.25)
            first, rest = state["hidden.bias"].split([1, 6])
            first.zero_(), rest.clamp_(min=0)
        return {"loss": dc.gather(bench.loss(1))} | bench.model.state_dict()

    as_in_one_process(comm, scenario)


def test_state_that_was_taken_before_training_follows_it(comm):
    def scenario(bench):
        state, kept = bench.model.state_dict(), copy.deepcopy(bench.model.state_dict())
        view = state["second.weight"][2:5]
        train(bench, 2)
        found = {"of a view": view * 2, "weight": state["up.weight"] + 0} | {f"kept {k}": v for k, v in kept.items()}
        state["second.weight"].zero_()
        return found | {"written": dc.gather(bench.model.second.weight.detach())}

    as_in_one_process(comm, scenario)


def test_the_state_of_an_optimizer_may_be_changed(comm):
    def scenario(bench):
        train(bench)
        for state in bench.optimizer.state_dict()["state"].values():
            state["momentum_buffer"].mul_(0.5)
        train(bench)
        return bench.model.state_dict()

    as_in_one_process(comm, scenario)


@pytest.mark.ranks(at_least=2)
def test_one_rank_may_save_it_and_others_read_plain_tensors(comm):
    bench = Bench(grid_over(comm, c=comm.size))
    state = bench.model.state_dict()
    if comm.rank == 0:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file)
        assert all(type(value) is torch.Tensor for value in loaded.values())
        assert torch.equal(loaded["second.weight"], state["second.weight"])
        assert type(pickle.loads(pickle.dumps(state))["up.weight"]) is torch.Tensor
    assert type(copy.deepcopy(state)["up.weight"]) is torch.Tensor
    assert type(state["up.weight"] * 2) is torch.Tensor
    with pytest.raises(ValueError, match="read-only"):
        state["up.weight"].numpy()[0] = 1


@pytest.mark.ranks(at_least=2)
def test_saving_state_that_training_has_changed_since_says_to_take_it_anew(comm):
    bench = Bench(grid_over(comm, c=comm.size))
    state = bench.model.state_dict()
    train(bench)
    raises_everywhere(comm, dc.UnsupportedOperation, "again on all ranks", lambda: torch.save(state, io.BytesIO()))


@pytest.mark.ranks(at_least=2)
def test_shapes_and_dtypes_are_read_without_a_message(comm):
    bench = Bench(grid_over(comm, c=comm.size))
    state = bench.model.state_dict()
    train(bench)
    if comm.rank == 0:
        weight = state["second.weight"]
        assert weight.shape == (12, 8, 3, 3)
        assert (weight.dim(), weight.dtype, weight.numel(), str(weight.device)) == (4, torch.float64, 864, "cpu")
