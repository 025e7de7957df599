"""A scan over ranks against one product after another on one."""

from __future__ import annotations

import pytest
import torch

from distconv.communication.transport import count_traffic
from distconv.kernels.scan import Identity, Problem, Size, backpropagate, recorded
from distconv.kernels.scan.elements import Affine
from distconv.kernels.scan.ranks import WHAT, ScanRank
from tests.kernels.scan.chains import assert_close, backpropagate_in_order, block, csr, dense_of, mixed, normal, stack

METHODS = [("linear", None), ("blelloch", None), ("truncated", 1), ("auto", None)]


@pytest.mark.parametrize(("method", "depth"), METHODS)
@pytest.mark.parametrize("samples", [1, 2])
def test_each_rank_gets_the_gradients_at_its_own_places(comm, method, depth, samples):
    for n in (1, comm.size - 1 or 2, 2 * comm.size + 1):
        mine = block(n, comm)
        jacobians, gradient, sources = stack(n, samples), normal(2, 4, seed=1), normal(n, 2, 4, seed=2)
        for given in (None, sources):
            found = backpropagate(
                gradient if comm.rank == 0 else None,
                jacobians[mine],
                method,
                comm,
                depth=depth,
                sources=None if given is None else given[mine],
            )
            assert_close(found, backpropagate_in_order(gradient, jacobians, given)[mine])


@pytest.mark.parametrize(("method", "depth"), METHODS)
def test_sparse_and_dense_matrices_of_any_shape_travel(comm, method, depth):
    for n in (comm.size, 2 * comm.size + 1):
        width, jacobians = mixed(n, seed=n)
        gradient = normal(2, width, seed=1)
        sources = [
            normal(*g.shape, seed=3) if i % 3 else None
            for i, g in enumerate(backpropagate_in_order(gradient, jacobians))
        ]
        mine = block(n, comm)
        found = backpropagate(gradient, jacobians[mine], method, comm, depth=depth, sources=sources[mine])
        assert_close(found, backpropagate_in_order(gradient, jacobians, sources)[mine])


@pytest.mark.ranks(2, 4, 6)
@pytest.mark.parametrize(("method", "depth"), METHODS)
def test_ranks_may_have_nothing_or_identities_alone(comm, method, depth):
    """The first and every third rank have no Jacobians, the second has an identity."""
    jacobians, gradient = stack(2 * comm.size), normal(2, 4, seed=1)
    counts = [0 if rank % 3 == 0 else 2 for rank in range(comm.size)]
    begin = sum(counts[: comm.rank])
    mine = [Identity()] if comm.rank == 1 else list(jacobians[begin : begin + counts[comm.rank]])
    found = backpropagate(gradient if comm.rank == 0 else None, mine, method, comm, depth=depth)
    whole = backpropagate_in_order(gradient, jacobians[2 : sum(counts)])
    assert_close(found, [gradient] if comm.rank == 1 else whole[begin - 2 : begin - 2 + counts[comm.rank]])


@pytest.mark.ranks(4, 8)
def test_a_rank_sends_one_product_and_one_vector_and_multiplies_no_matrices_downwards(comm):
    n, width = 3 * comm.size, 4
    with recorded() as steps, count_traffic() as traffic:
        backpropagate(normal(1, width), stack(n, 1)[block(n, comm)], "blelloch", comm)
    assert not [step for step in steps if "down" in step.phase and step.kind == "mm"]
    over = [step for step in steps if step.phase == "up-sweep over ranks"]
    assert len(over) <= comm.size.bit_length()
    header = 6 * 8
    assert traffic.sent[WHAT] <= header + 8 * width * width + 8 * width * comm.size.bit_length()


@pytest.mark.ranks(at_least=2)
def test_a_map_arrives_as_it_was_with_its_shift(comm):
    problem = Problem((2, 4), "torch.float64 on cpu", ((Size(4, 4),),) * comm.size, stacked=False)
    scan_rank, shift = ScanRank(comm, problem, problem.empty_tensor()), normal(2, 4, seed=2)
    dense = normal(2, 4, 4, seed=1)
    for matrix in (dense, dense.transpose(1, 2), dense[:1], csr(dense[0]), csr(dense[1], 2), Identity()):
        # The identity has no rows to say how long a shift is; it takes none.
        for given in (None, *([] if isinstance(matrix, Identity) else [shift, shift.t().contiguous().t()])):
            if comm.rank == 0:
                scan_rank.send_map(1, Affine(matrix, given))
            elif comm.rank == 1:
                found = scan_rank.receive_map(0)
                assert type(found.matrix) is type(matrix)
                assert isinstance(matrix, Identity) or torch.equal(dense_of(found.matrix), dense_of(matrix))
                assert (found.shift is None) == (given is None)
                assert given is None or torch.equal(found.shift, given)


def test_float32_stays_float32(comm):
    n = 2 * comm.size + 1
    jacobians, gradient = stack(n).float(), normal(2, 4, seed=1).float()
    found = backpropagate(gradient, jacobians[block(n, comm)], "blelloch", comm)
    assert found.dtype == torch.float32
    expected = torch.stack(backpropagate_in_order(gradient, jacobians))[block(n, comm)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
