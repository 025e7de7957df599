"""Bad input: one clear error, the same on all ranks."""

from __future__ import annotations

import pytest

from distconv.errors import ScanError
from distconv.kernels.scan import Identity, backpropagate
from distconv.kernels.scan.checks import build_problem
from tests.kernels.scan.chains import block, normal, stack

WRONG = {
    "columns": (
        lambda: (normal(2, 4), [normal(5, 4), normal(3, 6)]),
        r"jacobians\[1\] \(=3 x 6\) has 6 columns, but jacobians\[0\] results in 5 values. Pass transposed",
    ),
    "gradient's width": (
        lambda: (normal(2, 3), stack(2)),
        r"jacobians\[0\] \(=4 x 4\) has 4 columns, but the gradient \(2, 3\) results in 3 values",
    ),
    "behind an identity": (
        lambda: (normal(2, 4), [normal(5, 4), Identity(), normal(3, 4)]),
        r"jacobians\[2\] \(=3 x 4\) has 4 columns, but jacobians\[0\] results in 5 values",
    ),
    "empty": (lambda: (normal(2, 4), []), "no Jacobians on any of 1 ranks; pass at least one"),
    "an empty stack": (lambda: (normal(2, 4), stack(0)), "no Jacobians"),
    "samples": (lambda: (normal(2, 4), stack(3, 5)), r"has 5 samples, but the gradient has 2. Pass as many, or 1"),
    "dtype": (
        lambda: (normal(2, 4), stack(3).float()),
        "are torch.float32 on cpu and torch.float64 on cpu",
    ),
    "device": (lambda: (normal(2, 4), stack(3).to("meta")), "torch.float64 on cpu and torch.float64 on meta"),
    "integers": (lambda: (normal(2, 4).long(), stack(3).long()), "values are torch.int64; pass floating-point"),
    "no gradient": (lambda: (None, stack(3)), r"gradient is None; pass dl/dx_n \(B, N\)"),
    "gradient's shape": (lambda: (normal(4), stack(3)), r"gradient \(4,\) is not \(B, N\)"),
    "no samples": (lambda: (normal(0, 4), stack(3)), r"gradient \(0, 4\) is not \(B, N\) with at least one value"),
    "a stack of rectangles": (lambda: (normal(2, 4), normal(3, 2, 5, 4)), r"\(3, 2, 5, 4\) are not \(n, B, N, N\)"),
    "no matrix": (lambda: (normal(2, 4), [normal(4)]), r"jacobians\[0\] \(=\(4,\)\) is not a matrix"),
    "nothing": (lambda: (normal(2, 4), None), "Jacobians in a NoneType with sources in a NoneType; pass two tensors"),
    "a list as gradient": (lambda: ([1.0], stack(3)), r"gradient is a list; pass a tensor \(B, N\)"),
    "no tensor": (lambda: (normal(2, 4), ["J"]), r"jacobians\[0\] \(=str\) is not a matrix"),
    "COO": (lambda: (normal(2, 4), [normal(4, 4).to_sparse()]), r"jacobians\[0\] has layout torch.sparse_coo"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_makes_no_chain_is_refused(case):
    make, text = WRONG[case]
    for method in ("linear", "blelloch", "auto"):
        with pytest.raises(ScanError, match=text):
            backpropagate(*make(), method)


def test_sources_that_do_not_fit_are_refused():
    gradient, jacobians = normal(2, 4), stack(3)
    for sources, text in [
        (normal(2, 2, 4), r"sources \(2, 2, 4\) are not \(n, B, N\) = \(3, B, 4\)"),
        (normal(3, 5, 4), r"sources have \(5,\) samples, but the gradient has 2"),
    ]:
        with pytest.raises(ScanError, match=text):
            backpropagate(gradient, jacobians, sources=sources)
    with pytest.raises(ScanError, match="Jacobians in a Tensor with sources in a list"):
        backpropagate(gradient, jacobians, sources=[None] * 3)
    with pytest.raises(ScanError, match="1 sources, 3 Jacobians"):
        backpropagate(gradient, list(jacobians), sources=[None])
    with pytest.raises(ScanError, match=r"sources\[1\] \(2, 5\) does not fit jacobians\[1\], \(2, 4, 4\)"):
        backpropagate(gradient, list(jacobians), sources=[None, normal(2, 5), None])
    with pytest.raises(ScanError, match="an identity, which has no source"):
        backpropagate(gradient, [Identity()], sources=[normal(2, 4)])


@pytest.mark.ranks(at_least=2)
def test_jacobians_are_stacked_if_those_of_all_ranks_are_that_have_any(comm):
    last = comm.size - 1
    gradient = normal(2, 4) if comm.rank == 0 else None
    for of_last, stacked, n in ((stack(2), True, 2 * comm.size), (list(stack(2)), False, 2 * comm.size)):
        _, whole = build_problem(gradient, of_last if comm.rank == last else stack(2), None, comm)
        assert (whole.stacked, whole.n, whole.active) == (stacked, n, [*range(comm.size)])
    _, whole = build_problem(gradient, [] if comm.rank == last else stack(2), None, comm)
    assert (whole.stacked, whole.active) == (True, [*range(last)] or [0])
    # Widths go on behind a rank without any.
    matrices = [normal(3, 4), normal(5, 3)] if comm.rank == 0 else []
    assert build_problem(gradient, matrices, None, comm)[1].widths == [5] * comm.size


@pytest.mark.ranks(at_least=2)
def test_ranks_that_do_not_fit_each_other_all_raise_the_same(comm):
    n, gradient = 2 * comm.size, normal(2, 4)
    mine = stack(n)[block(n, comm)]
    last = comm.rank == comm.size - 1
    wrong = {
        rf"is not a matrix.* \(on rank {comm.size - 1}\)": ["J"],
    }
    for text, theirs in wrong.items():
        with pytest.raises(ScanError, match=text) as raised:
            backpropagate(gradient if comm.rank == 0 else None, theirs if last else mine, "blelloch", comm)
        assert len(set(comm.allgather(str(raised.value)))) == 1
    with pytest.raises(ScanError, match="no Jacobians on any of"):
        backpropagate(gradient, stack(0), "blelloch", comm)
    with pytest.raises(ScanError, match=r"gradient is None.*\(on rank 0\)"):
        backpropagate(None, mine, "blelloch", comm)
    assert len(backpropagate(gradient, mine, "blelloch", comm)) == len(mine)
