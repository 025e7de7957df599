"""Backpropagation of a gradient through a chain of transposed Jacobians, on one rank or over ranks.

:func:`backpropagate` checks its arguments, selects a method and runs it; :func:`explain` predicts the time of each
method. :mod:`distconv.kernels.scan` exports both. The module does not depend on the layers to which the Jacobians
belong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from distconv.communication.agreement import check_same_on_all_ranks
from distconv.errors import ScanError

from .algorithm import gradients
from .checks import Problem, build_problem
from .cost import SPEEDS, ScanPrediction, Speed, predict
from .elements import Matrix
from .ranks import ScanRank, linear_over_ranks, scan_over_ranks

Method = Literal["linear", "blelloch", "truncated", "auto"]


@torch.no_grad()
def backpropagate(
    gradient: torch.Tensor | None,
    jacobians: torch.Tensor | Sequence[Matrix],
    method: Method = "auto",
    comm: Any = None,
    *,
    sources: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    depth: int | None = None,
    speed: Speed | None = None,
) -> Any:
    """Return the gradients of x_{n-1}, ..., x_0, given that of x_n and the transposed Jacobians.

    With ``comm`` the Jacobians are split over its ranks: each rank passes its own Jacobians, perhaps none, and gets
    the gradients after them. The first rank has the first Jacobians and the gradient.

    Collective if ``comm`` is given: call on every rank. No other messages may be in flight over ``comm``: pass the
    communicator of a grid, or a duplicate.

    Arguments are not changed. A result may be the argument itself, where a Jacobian is the identity.

    Source: BPPSA, Eqs. 3-5, algorithm 1.

    Parameters
    ----------
    gradient : Tensor or None
        dl/dx_n (B, N). On ranks other than the first it is ignored and may be None.
    jacobians : Tensor or sequence of Matrix
        Transposed, the last layer's first, as in Eq. 5: (dx_n/dx_{n-1})^T, ..., (dx_1/dx_0)^T. One dense tensor
        (n, B, N, N), or (n, 1, N, N) if all samples have the same Jacobians; or a sequence of dense (B, N_in, N_out) or
        (N_in, N_out), torch CSR (N_in, N_out), :class:`~distconv.kernels.jacobian.SparseJacobian` and
        :class:`Identity`.
    method : {"auto", "linear", "blelloch", "truncated"}
        ``"linear"`` computes one product after another; ``"blelloch"`` is Algorithm 1; ``"truncated"`` is Algorithm 1
        with ``depth`` levels of up-sweep on each rank and the linear method above them; ``"auto"`` selects the method
        that :func:`explain` predicts to be the fastest.
    comm : MPI.Intracomm, optional
        Ranks over which the Jacobians are split. Default: this rank has all of them.
    sources : Tensor or sequence of (Tensor or None), optional
        Gradients s of x_{n-1}, ..., x_0 from outside of the chain, shaped like the result: g_{i-1} = J_i g_i + s_{i-1}.
        In a list, None stands for no source.
    depth : int, optional
        Number of levels of ``"truncated"``. Default: the predicted optimum.
    speed : Speed, optional
        Speed of this machine, for ``"auto"`` and for ``"truncated"`` without ``depth``. Default: the entry of
        :data:`SPEEDS` for the device.

    Returns
    -------
    Tensor or list of Tensor
        A tensor (n, B, N) for Jacobians in one tensor, otherwise a list of (B, N_i).

    Raises
    ------
    ScanError
        On every rank, before any value is sent, if the arguments do not fit each other.
    """
    if comm is not None:
        # First, because the choice of the method determines which messages follow.
        check_same_on_all_ranks(comm, "method of backpropagate", f"{method}, depth {depth}, {speed}")
    if method not in get_args(Method) or (depth is not None and depth < 0):
        raise ScanError(f"backpropagate: method {method!r}, depth {depth}: pass one of {get_args(Method)}, depth >= 0")
    level, problem = build_problem(gradient, jacobians, sources, comm)
    chosen, depth = _choose(method, depth, problem, speed)
    # The first rank has all Jacobians, or it is alone: nothing is sent.
    if len(problem.active) == 1 and (comm is None or comm.rank == 0):
        assert gradient is not None
        return gradients(gradient, level, depth)
    if comm.rank not in problem.active:
        return level.apply_in_order(problem.empty_tensor().new_empty(problem.gradient))  # this rank has no Jacobians
    scan_rank = ScanRank(comm, problem, problem.empty_tensor())
    if chosen == "linear":
        return linear_over_ranks(gradient, level, scan_rank)
    return scan_over_ranks(gradient, level, depth, scan_rank)


def explain(
    gradient: torch.Tensor | None,
    jacobians: torch.Tensor | Sequence[Matrix],
    comm: Any = None,
    speed: Speed | None = None,
) -> ScanPrediction:
    """Return the predicted time of each method for some arguments of :func:`backpropagate`.

    Collective if ``comm`` is given: call on every rank.

    Parameters
    ----------
    gradient, jacobians, comm, speed
        As in :func:`backpropagate`.

    Returns
    -------
    ScanPrediction
        Printed, it shows the times in ms.

    Raises
    ------
    ScanError
        As :func:`backpropagate`.
    """
    return _predict(build_problem(gradient, jacobians, None, comm)[1], speed)


def _predict(problem: Problem, speed: Speed | None) -> ScanPrediction:
    return predict(problem, speed or SPEEDS["cuda" if problem.dtype.endswith("cuda") else "cpu"])


def _choose(method: str, depth: int | None, problem: Problem, speed: Speed | None) -> tuple[str, int | None]:
    """Return the method and its number of levels of the up-sweep; None for all."""
    if method == "auto" or (method == "truncated" and depth is None):
        prediction = _predict(problem, speed)
        chosen = prediction.method if method == "auto" else "truncated"
        # Linear is a sweep without levels; None stands for all levels.
        return chosen, {"linear": 0, "blelloch": None, "truncated": prediction.depth}[chosen]
    return method, {"linear": 0, "blelloch": None, "truncated": depth}[method]
