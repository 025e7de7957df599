"""Replicas of stages: each adds its micro-batches' gradients, and all of them the replicas', in the order of ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from distconv.pipeline import Pipeline, schedule
from distconv.pipeline.runtime.replicas import allgather_replicas, has_gradients, sum_gradients
from distconv.pipeline.schedules.actions import Kind
from tests.pipeline.training import SGD, Chain, assert_close, batches, convolutions, copies, states, train_plainly

PLACEMENTS = {3: [(2, 1), (1, 2)], 4: [(2, 2), (3, 1), (1, 3), (1, 2, 1)], 6: [(2, 3, 1), (3, 3)]}


class Reference:
    """Stages in one process, whose gradients are added as replicas add them."""

    def __init__(self, stages, replicas):
        self.stages, self.replicas = stages, replicas
        self.parameters = [list(stage.parameters()) for stage in stages]
        self.optimizers = [SGD(each) if each else None for each in self.parameters]

    def gradients(self, x, target, share):
        """Those of every stage, and the loss."""
        loss = F.cross_entropy(Chain(self.stages)(x), target)
        flat = [p for each in self.parameters for p in each]
        found = iter(torch.autograd.grad(loss * share, flat))
        return [[next(found) for _ in each] for each in self.parameters], float(loss.detach())

    def update(self, stage, gradients, divisor=1):
        """``gradients`` by micro-batch; those of a replica first, then the replicas'."""
        count = self.replicas[stage]
        if self.optimizers[stage] is None:
            return
        for index, parameter in enumerate(self.parameters[stage]):
            sums = [torch.zeros_like(parameter) for _ in range(count)]
            for microbatch, each in gradients.items():
                sums[microbatch % count] += each[index]
            parameter.grad = sums[0]
            for other in sums[1:]:
                parameter.grad += other
            if divisor != 1:
                parameter.grad /= divisor
        self.optimizers[stage].step()

    def step(self, x, target, microbatches):
        count, found, total = min(microbatches, len(x)), {}, 0.0
        for number, (piece, its) in enumerate(zip(x.tensor_split(count), target.tensor_split(count), strict=True)):
            found[number], loss = self.gradients(piece, its, len(piece) / len(x))
            total += loss * (len(piece) / len(x))
        for stage in range(len(self.stages)):
            self.update(stage, {number: each[stage] for number, each in found.items()})
        return total


def assert_parameters_equal(found, expected):
    for one, two in zip(found, expected, strict=True):
        for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
            assert torch.equal(p, q), name


def running(stages):
    return {name: value for name, value in states(stages).items() if "running" in name or "tracked" in name}


def assert_replicas_equal(comm, pipe, stages):
    mine = [value.tolist() for value in stages[pipe.stage].state_dict().values()]
    for stage, theirs in comm.allgather((pipe.stage, mine)):
        assert stage != pipe.stage or theirs == mine


@pytest.mark.long
@pytest.mark.ranks(3, 4, 6)
@pytest.mark.parametrize("name", ["gpipe", "1f1b-so", "zero-bubble"])
def test_replicas_add_gradients_in_their_order(comm, name):
    for replicas in PLACEMENTS[comm.size]:
        stages = convolutions(len(replicas))
        alone, plain = Reference(copies(stages), replicas), copies(stages)
        # The last batches have fewer micro-batches than there are replicas; 4 do not divide by 3.
        data = batches(4, [(5, 4, 4), (7, 3, 5), (2, 4, 4), (1, 6, 6)])
        pipe = Pipeline(stages, comm, name, F.cross_entropy, 4, replicas, SGD)
        assert [pipe.step(*batch) for batch in data] == [alone.step(*batch, 4) for batch in data]
        assert_replicas_equal(comm, pipe, stages)
        pipe.synchronize()
        assert_parameters_equal(stages, alone.stages)
        torch.testing.assert_close(running(stages), running(alone.stages), rtol=1e-12, atol=1e-14)
        train_plainly(plain, data, 4)
        assert_close(stages, plain, rtol=1e-10)
        pipe.close()


class Grouped(Reference):
    """PipeDream with replicas: the mini-batches of a group, one for each replica, make one update with their mean."""

    def __init__(self, stages, replicas):
        super().__init__(stages, replicas)
        self.versions = [[[p.detach().clone() for p in each]] for each in self.parameters]

    def load(self, stage, version):
        for parameter, value in zip(self.parameters[stage], self.versions[stage][version], strict=True):
            parameter.data.copy_(value)

    def train(self, data, versions):
        """``versions[stage, minibatch]`` is what its passes use."""
        pending, losses = [{} for _ in self.stages], []
        for number, (x, target) in enumerate(data):
            for stage in range(len(self.stages)):
                self.load(stage, versions[stage, number])
            found, loss = self.gradients(x, target, 1.0)
            losses.append((number, loss))
            for stage, count in enumerate(self.replicas):
                pending[stage][number] = found[stage]
                self.load(stage, -1)
                if number % count == count - 1 or number == len(data) - 1:
                    self.update(stage, pending[stage], len(pending[stage]))
                    pending[stage] = {}
                    self.versions[stage].append([p.detach().clone() for p in self.parameters[stage]])
        return losses


@pytest.mark.long
@pytest.mark.ranks(3, 4, 6)
def test_pipedream_with_replicas_averages_over_groups_of_mini_batches(comm):
    for replicas in PLACEMENTS[comm.size]:
        for count in (1, 11, 24):  # the last group is incomplete, or never complete
            stages, data = convolutions(len(replicas)), batches(count)
            alone = Grouped(copies(stages), replicas)
            made = schedule("pipedream", len(replicas), count, replicas=replicas)
            versions = {(a.stage, a.microbatch): a.version for a in made if a.kind is Kind.F}
            pipe = Pipeline(stages, comm, "pipedream", F.cross_entropy, 1, replicas, SGD)
            returned = [pipe.step(*batch) for batch in data]
            pipe.drain()
            assert pipe.losses == alone.train(data, versions)
            told = comm.allgather(returned)
            assert all(each == told[0] for each in told)
            assert_replicas_equal(comm, pipe, stages)
            pipe.synchronize()
            assert_parameters_equal(stages, alone.stages)
            torch.testing.assert_close(running(stages), running(alone.stages), rtol=1e-12, atol=1e-14)
            pipe.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("weights", ["newest", "stash", "predict", "recompute"])
def test_replicas_of_an_asynchronous_schedule_end_with_equal_weights(comm, weights):
    ends = []
    for _ in range(2):
        stages = convolutions(2, dropout=0.2, inplace=False)
        torch.manual_seed(5)
        pipe = Pipeline(stages, comm, "pipedream", F.cross_entropy, 1, (3, 1), SGD, weights)
        for batch in batches(10):
            pipe.step(*batch)
        pipe.drain()
        assert_replicas_equal(comm, pipe, stages)
        pipe.synchronize()
        ends.append(copy.deepcopy(states(stages)))
        pipe.close()
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.ranks(1, 2, 3)
def test_a_gradient_that_some_replicas_lack_counts_as_zero(comm):
    shapes = {(3, 2): torch.float32, (5,): torch.float64, (): torch.float32}
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in shapes.items()]
    if comm.rank == comm.size - 1:
        parameters[0].grad = torch.full((3, 2), 6.0)
    parameters[1].grad = torch.full((5,), float(comm.rank), dtype=torch.float64)
    there = allgather_replicas(comm, has_gradients(parameters), "a test")
    sum_gradients(comm, parameters, there, comm.size, "a test")
    assert torch.equal(parameters[0].grad, torch.full((3, 2), 6.0) / comm.size)
    assert torch.equal(parameters[1].grad, torch.full((5,), sum(range(comm.size)) / comm.size).double())
    assert parameters[2].grad is None
