"""Groups of sharded weights: what a rank keeps, what is gathered when, and how gradients are summed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.communication import agreement
from distconv.communication.transport import count_traffic
from distconv.parameters import gathered_layers
from distconv.parameters.weight_groups import WeightGroup
from tests.distconv.layouts import grid_over, normal, raises_everywhere
from tests.layers.compare import close

pytestmark = pytest.mark.ranks(2, 3, 4)


def stack(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers))).double()


@pytest.fixture
def one_layer_a_group(monkeypatch) -> None:
    monkeypatch.setattr(gathered_layers, "GROUP_BYTES", 1)


@pytest.fixture
def events(monkeypatch) -> list[tuple[str, str]]:
    """Return the steps of the groups as they happen, with the first weight of each group."""
    found: list[tuple[str, str]] = []
    for name in ("start_gather", "finish_gather", "start_reduce"):
        original = getattr(WeightGroup, name)

        def record(group, name=name, original=original):
            if name != "finish_gather" or group._exchange is not None:
                found.append((name, group.weights[0].name))
            return original(group)

        monkeypatch.setattr(WeightGroup, name, record)
    return found


def sharded(comm, model):
    grid = grid_over(comm, n=comm.size)
    return dc.parallelize(model, grid, shard_weights=True), dc.scatter(normal(5, 6), grid)


def groups_of(model) -> list[WeightGroup]:
    hooks = [getattr(hook, "__self__", None) for layer in model for hook in layer._forward_pre_hooks.values()]
    return [hook.weights[0][2] for hook in hooks if hook is not None]


def test_each_rank_has_its_share_of_weights_gradients_and_optimizer_state(comm) -> None:
    model, x = sharded(comm, stack())
    optimizer = torch.optim.Adam(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        most = -(-parameter.numel() // comm.size) if name.endswith("bias") else -(-6 // comm.size) * 6
        for held in (
            parameter,
            parameter.grad,
            *(optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")),
        ):
            assert held.local.untyped_storage().nbytes() <= 8 * most, name
            assert comm.allreduce(held.local.numel()) == parameter.numel(), name


@pytest.mark.usefixtures("one_layer_a_group")
def test_at_most_two_groups_are_gathered_and_none_after_backward(comm) -> None:
    model, x = sharded(comm, stack())
    groups = groups_of(model)
    assert len(set(groups)) == 4
    most = []

    def count(*_) -> None:
        most.append(sum(bool(group.full) or group._exchange is not None for group in groups))

    for layer in model:
        layer.register_forward_hook(count)
        layer.weight.register_hook(count)
    for _ in range(2):
        model(x).sum().backward()
    assert set(most) == {1, 2}
    assert not any(group.full or group._exchange for group in groups)
    assert not groups[0].gathered.memory


@pytest.mark.usefixtures("one_layer_a_group")
def test_the_next_group_is_gathered_ahead_in_both_directions(comm, events) -> None:
    model, x = sharded(comm, stack(3))
    model(x).sum().backward()
    gathers = [event for event in events if event[0] != "start_reduce"]
    layers = ["0.weight", "1.weight", "2.weight"]
    # Nothing is known before the first pass. The last group of forward is the first one of backward.
    order = [*layers, "1.weight", "0.weight"]
    assert gathers == [(step, name) for name in order for step in ("start_gather", "finish_gather")]
    events.clear()
    model(x).sum().backward()
    assert events == [
        ("start_gather", "0.weight"), ("finish_gather", "0.weight"), ("start_gather", "1.weight"),
        ("finish_gather", "1.weight"), ("start_gather", "2.weight"), ("finish_gather", "2.weight"),
        ("start_gather", "1.weight"), ("start_reduce", "2.weight"), ("finish_gather", "1.weight"),
        ("start_gather", "0.weight"), ("start_reduce", "1.weight"), ("finish_gather", "0.weight"),
        ("start_reduce", "0.weight"),
    ]  # fmt: skip


def test_a_step_moves_the_weights_twice_and_the_gradients_once(comm) -> None:
    model, x = sharded(comm, stack())
    model(x).sum().backward()
    with count_traffic() as traffic:
        model(x).sum().backward()
    own = sum(parameter.local.nbytes for parameter in model.parameters())
    whole = sum(parameter.nbytes for parameter in model.parameters())
    # All weights are one group, which the backward pass finds gathered.
    assert traffic.sent["gathering 0.weight and 7 more"] == own * (comm.size - 1)
    sums = [nbytes for what, nbytes in traffic.sent.items() if what.startswith("sum of the gradients of")]
    assert sums == [whole - own]
    assert not any(what.startswith("gradient sum") for what, _ in traffic.reduced)


@pytest.mark.usefixtures("one_layer_a_group")
def test_layers_are_gathered_again_for_backward(comm) -> None:
    model, x = sharded(comm, stack(2))
    model(x).sum().backward()
    with count_traffic() as traffic:
        model(x).sum().backward()
    own = [sum(parameter.local.nbytes for parameter in layer.parameters()) for layer in model]
    assert traffic.sent["gathering 0.weight and 1 more"] == 2 * own[0] * (comm.size - 1)
    assert traffic.sent["gathering 1.weight and 1 more"] == own[1] * (comm.size - 1)


def test_hooks_on_parameters_get_the_summed_gradient(comm) -> None:
    model, x = sharded(comm, stack(2))
    plain, found = stack(2), []
    model[0].weight.register_hook(lambda gradient: found.append(gradient) or 2 * gradient)
    model[1].weight.register_post_accumulate_grad_hook(lambda parameter: found.append(parameter.grad.clone()))
    model(x).pow(2).sum().backward()
    plain(normal(5, 6)).pow(2).sum().backward()
    later, first = (dc.gather(gradient) for gradient in found)
    close(later, plain[1].weight.grad, "post-accumulate hook")
    close(first, plain[0].weight.grad, "hook")
    close(dc.gather(model[0].weight.grad), 2 * plain[0].weight.grad, "the hook's result")


def test_gradients_by_autograd_grad_and_their_derivatives(comm) -> None:
    def penalized(model, x):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(torch.tanh(model(x)).sum(), parameters, create_graph=True)
        sum(gradient.pow(2).sum() for gradient in gradients).backward()
        return [*gradients, *(parameter.grad for parameter in parameters)]

    expected = penalized(stack(2), normal(5, 6))
    found = penalized(*sharded(comm, stack(2)))
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        close(dc.gather(a.detach()), b.detach(), f"gradient {number}")


def test_a_part_of_the_model_sees_the_weights_after_a_step(comm) -> None:
    model, x = sharded(comm, stack(2))
    for _ in range(2):
        y = dc.gather(model[0](x).detach())
        weight, bias = (dc.gather(parameter.detach()) for parameter in model[0].parameters())
        close(y, torch.nn.functional.linear(normal(5, 6), weight, bias), "y")
        with torch.no_grad():
            model[0].weight.add_(1)


def test_what_a_failed_backward_pass_has_left_is_dropped(comm) -> None:
    model, x = sharded(comm, stack(2))

    def fail(gradient):
        raise KeyError("a hook")

    y = model[0](x)
    handle = y.local.register_hook(fail)
    with pytest.raises(KeyError):
        model[1](y).sum().backward()
    handle.remove()
    gathered = groups_of(model)[0].gathered
    model[0](x)  # a part of the model, outside of a pass: its messages are complete when it returns
    assert not gathered._sending
    assert not gathered._is_running
    model.zero_grad()
    model(x).sum().backward()
    plain = stack(2)
    plain(normal(5, 6)).sum().backward()
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(dc.gather(parameter.grad), expected.grad, name)


def test_a_copy_has_weights_of_its_own(comm) -> None:
    model, x = sharded(comm, stack(2))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.zero_()
    assert set(groups_of(twin)).isdisjoint(groups_of(model))
    close(dc.gather(twin(x).detach()), twin[1].state_dict()["bias"].expand(5, 6), "the copy")
    close(dc.gather(model(x).detach()), stack(2)(normal(5, 6)).detach(), "the model")


class Either(nn.Module):
    """Two layers that each rank may call in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.reverse = stack(2), False

    def forward(self, x):
        for layer in reversed(self.layers) if self.reverse else self.layers:
            x = layer(x)
        return x


@pytest.mark.usefixtures("one_layer_a_group")
def test_ranks_that_run_layers_in_another_order_raise(comm, monkeypatch) -> None:
    monkeypatch.setattr(agreement, "ORDER_CHECKED", 10**6)  # earlier tests have used the communicator
    model, x = sharded(comm, Either())
    model.reverse = comm.rank == 1
    raises_everywhere(
        comm, dc.MismatchError, "ranks are at different operations: gathering layers.0.weight", lambda: model(x)
    )


def test_captured_steps_gather_and_reduce(comm) -> None:
    def trained(model, batches, captured):
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), []

        def step(x):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses.append(step(batches[0]))  # makes the momentum
        act = dc.capture(step, batches[0]) if captured else step
        losses += [act(x).clone() for x in batches]
        return losses

    grid = grid_over(comm, n=comm.size)
    batches = [normal(5, 6, seed=seed) for seed in range(4)]
    model = dc.parallelize(stack(), grid, shard_weights=True)
    plain = stack()
    found = trained(model, [dc.scatter(x, grid) for x in batches], captured=True)
    expected = trained(plain, [batches[0], *batches[1:]], captured=False)
    # Capturing takes no step: the same sequence.
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        close(dc.gather(a), b, f"loss {number}")
    for name, value in plain.state_dict().items():
        close(model.state_dict()[name], value, name)
