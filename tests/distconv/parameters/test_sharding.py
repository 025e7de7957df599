"""Sharded parameters, and what users do around a step: all of it as with a plain module on one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import distconv as dc
from tests.distconv.layouts import grid_over, normal
from tests.distconv.parameters.bench import Bench, Net, as_in_one_process, sharded_grids, whole_gradients

pytestmark = pytest.mark.ranks(at_most=6)


@pytest.mark.ranks(at_least=2)
def test_each_rank_has_its_share_of_weights_gradients_and_optimizer_state(comm):
    bench = Bench(grid_over(comm, c=comm.size))
    bench.loss(0).backward()
    bench.optimizer.step()
    weights = [bench.model.second.weight, bench.model.up.weight, bench.model.hidden.weight]
    for weight in weights:
        assert isinstance(weight, nn.Parameter)
        assert isinstance(weight, dc.DistTensor)
        for held in (weight, weight.grad, bench.optimizer.state[weight]["momentum_buffer"]):
            assert comm.allreduce(held.local.numel()) == weight.shape.numel()


@pytest.mark.ranks(at_least=2)
def test_what_is_frozen_stays_so_and_gradients_that_are_there_are_kept(comm):
    torch.manual_seed(2)
    layer = nn.Conv2d(4, 8, 3).double()
    layer.weight.grad, layer.bias.grad = normal(8, 4, 3, 3, seed=1), normal(8, seed=2)
    layer.weight.requires_grad_(False)
    whole = {name: (p.detach().clone(), p.grad.clone()) for name, p in layer.named_parameters()}
    grid = grid_over(comm, c=comm.size)
    dc.parallelize(layer, grid)
    for name, parameter in layer.named_parameters():
        assert isinstance(parameter, dc.DistTensor), name
        assert torch.equal(dc.gather(parameter.detach()), whole[name][0]), name
        assert torch.equal(dc.gather(parameter.grad), whole[name][1]), name
        trains = name == "bias"
        assert (parameter.requires_grad, parameter.local.requires_grad) == (trains, trains), name
    layer(dc.scatter(normal(2, 4, 5, 5), grid)).sum().backward()
    assert torch.equal(dc.gather(layer.weight.grad), whole["weight"][1])
    torch.testing.assert_close(dc.gather(layer.bias.grad), whole["bias"][1] + 2 * 3 * 3, rtol=1e-12, atol=1e-12)


def test_a_model_and_its_optimizer_may_be_copied_saved_and_resumed(comm):
    def scenario(bench):
        for step in range(2):
            bench.optimizer.zero_grad()
            bench.loss(step).backward()
            bench.optimizer.step()
        saved = copy.deepcopy(bench.optimizer.state_dict())
        twin = copy.deepcopy(bench.model)
        optimizer = bench.made(twin)
        optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        bench.loss(5, twin).backward()
        optimizer.step()
        momenta = {f"momentum {n}": s["momentum_buffer"] for n, s in optimizer.state_dict()["state"].items()}
        return twin.state_dict() | momenta

    as_in_one_process(comm, scenario)


def test_state_goes_to_a_plain_model_and_back(comm):
    for grid in sharded_grids(comm):
        bench, plain = Bench(grid), Bench(None)
        plain.loss(0).backward()
        plain.optimizer.step()
        bench.model.load_state_dict(plain.model.state_dict())
        back = Net().double()
        back.load_state_dict(bench.model.state_dict())
        for name, tensor in plain.model.state_dict().items():
            assert torch.equal(back.state_dict()[name], tensor), name


def test_state_is_loaded_by_swapping_parameters(comm):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:

        def scenario(bench):
            state = {name: tensor * 2 for name, tensor in bench.model.state_dict().items()}
            parameters = list(bench.model.parameters())
            bench.model.load_state_dict(state)
            assert all(p is q for p, q in zip(parameters, bench.model.parameters(), strict=True))
            bench.loss(1).backward()
            bench.optimizer.step()
            return bench.model.state_dict()

        as_in_one_process(comm, scenario)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_penalties_on_the_weights(comm):
    def scenario(bench):
        weights = list(bench.model.parameters())
        penalty = sum((p**2).sum() for p in weights) + 0.1 * sum(p.abs().sum() for p in weights)
        (bench.loss(1) + 1e-2 * penalty).backward()
        return whole_gradients(bench.model)

    as_in_one_process(comm, scenario)


def test_scaled_losses_are_skipped_on_all_ranks_or_on_none(comm):
    def scenario(bench):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(2):
            bench.optimizer.zero_grad()
            loss = bench.loss(step)
            if step:
                # One entry of one shard: whoever has it must not be alone in skipping the step.
                loss = loss + bench.model.second.weight.flatten()[0] * float("inf")
            scaler.scale(loss).backward()
            scaler.step(bench.optimizer)
            scaler.update()
        return bench.model.state_dict() | {"scale": torch.tensor(scaler.get_scale())}

    as_in_one_process(comm, scenario)


@pytest.mark.ranks(at_least=2)
def test_a_layer_may_be_converted_in_place(comm):
    def scenario(bench):
        bench.model.second.float()
        assert {parameter.dtype for parameter in bench.model.second.parameters()} == {torch.float32}
        return bench.model.second.state_dict()

    as_in_one_process(comm, scenario)


def halved(layer):
    return nn.utils.parametrize.register_parametrization(layer, "weight", Half())


class Half(nn.Module):
    def forward(self, weight):
        return weight * 0.5 + weight.norm()


@pytest.mark.long
@pytest.mark.usefixtures("fallback")
@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
@pytest.mark.ranks(at_most=4)
@pytest.mark.parametrize(
    "change", [halved, nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.orthogonal]
)
def test_weights_that_are_sharded_may_be_computed_from_then_on(comm, change):
    def scenario(bench):
        torch.manual_seed(6)
        for layer in (bench.model.second, bench.model.hidden):
            change(layer)
        bench.optimizer = bench.made(bench.model)
        for step in range(2):
            bench.optimizer.zero_grad()
            bench.loss(step).backward()
            bench.optimizer.step()
        return whole_gradients(bench.model) | bench.model.state_dict()

    as_in_one_process(comm, scenario)


@pytest.mark.usefixtures("fallback")
@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
@pytest.mark.ranks(at_most=4)
def test_sharded_weights_are_initialised_as_whole_ones(comm):
    def scenario(bench):
        torch.manual_seed(1)
        nn.init.orthogonal_(bench.model.second.weight)
        nn.init.orthogonal_(bench.model.hidden.weight)
        nn.init.kaiming_normal_(bench.model.up.weight)
        nn.init.dirac_(bench.model.first.weight)
        bench.model.head.reset_parameters()
        return bench.model.state_dict()

    as_in_one_process(comm, scenario)
