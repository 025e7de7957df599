"""Views: in-place changes show in both the view and its source, for every function and its defaults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.layers.views import SHAPE, View, check_change_reaches_source, check_view_follows_source

VIEWS: dict[str, View] = {
    "narrow": lambda y: y.narrow(2, 1, 3),
    "narrow from the end": lambda y: torch.narrow(y, -1, -3, 2),
    "select": lambda y: y.select(1, 2),
    "select from the end": lambda y: torch.select(y, -1, -1),
    "index": lambda y: y[1],
    "slice": lambda y: y[:, 1:3],
    "slice with steps": lambda y: y[..., ::2],
    "slices of all": lambda y: y[1:, :2, 2:5, 1:-1],
    "index and slice": lambda y: y[:, -1, 1:],
    "new dimension": lambda y: y[:, None, 2],
    "ellipsis": lambda y: y[..., 2, :],
    "view": lambda y: y.view(3, -1),
    "view of parts": lambda y: y.view(3, 2, 2, 6, 5),
    "view_as": lambda y: y.view_as(torch.empty(12, 30)),
    "reshape": lambda y: y.reshape(12, 30),
    "reshape_as": lambda y: y.reshape_as(torch.empty(3, 4, 30)),
    "flatten": lambda y: y.flatten(),
    "flatten dims": lambda y: torch.flatten(y, 1, 2),
    "unflatten": lambda y: y.unflatten(2, (2, -1)),
    "ravel": lambda y: torch.ravel(y),
    "squeeze": lambda y: y[:, 1:2].squeeze(),
    "squeeze dim": lambda y: torch.squeeze(y[:, :, 2:3], 2),
    "squeeze dims": lambda y: y[:1, :, 2:3].squeeze((0, 2)),
    "unsqueeze": lambda y: torch.unsqueeze(y, -1),
    "unsqueeze first": lambda y: y.unsqueeze(0),
    "atleast_1d": lambda y: torch.atleast_1d(y),
    "atleast_3d": lambda y: torch.atleast_3d(y[0, 0]),
    "permute": lambda y: y.permute(2, 0, 3, 1),
    "permute from the end": lambda y: torch.permute(y, (0, -1, 1, -2)),
    "transpose": lambda y: y.transpose(1, 2),
    "swapaxes": lambda y: torch.swapaxes(y, 0, -1),
    "swapdims": lambda y: y.swapdims(2, 3),
    "movedim": lambda y: y.movedim(1, -1),
    "movedim of two": lambda y: torch.movedim(y, (0, 1), (2, 3)),
    "moveaxis": lambda y: y.moveaxis(2, 0),
    "t": lambda y: y[0, 0].t(),
    "T": lambda y: y[0, 1].T,
    "mT": lambda y: y.mT,
    "adjoint": lambda y: y.adjoint(),
    "H": lambda y: y[2, 0].H,
    "mH": lambda y: y.mH,
}
MULTI_VIEW_FUNCTIONS: dict[str, View] = {
    "unbind": lambda y: y.unbind()[1],
    "unbind dim": lambda y: torch.unbind(y, -2)[4],
    "split": lambda y: y.split(2)[1],
    "split dim": lambda y: torch.split(y, 4, 2)[1],
    "split by sizes": lambda y: y.split([1, 2, 3], dim=2)[2],
    "split_with_sizes": lambda y: y.split_with_sizes([1, 2])[1],
    "split_with_sizes dim": lambda y: torch.split_with_sizes(y, [1, 3], 1)[1],
    "chunk": lambda y: y.chunk(2)[1],
    "chunk dim": lambda y: torch.chunk(y, 3, -1)[2],
    "tensor_split": lambda y: y.tensor_split(2)[0],
    "tensor_split at": lambda y: torch.tensor_split(y, (1, 3), dim=1)[1],
    "hsplit": lambda y: y.hsplit(2)[1],
    "vsplit": lambda y: torch.vsplit(y, (1,))[1],
    "dsplit": lambda y: y.dsplit((2, 5))[1],
}
"""Functions of several results, which autograd does not allow to be changed in place."""
EXPANDED: dict[str, View] = {
    "expand": lambda y: y[:, :1].expand(3, 7, 6, 5),
    "expand in front": lambda y: y.expand(2, -1, -1, -1, -1),
    "broadcast_to": lambda y: torch.broadcast_to(y[:1], SHAPE),
    "expand_as": lambda y: y[..., :1].expand_as(torch.empty(SHAPE)),
    "broadcast_tensors": lambda y: torch.broadcast_tensors(y[:, :, :1], torch.empty(SHAPE))[0],
    "unfold": lambda y: y.unfold(2, 3, 2),
    "unfold with gaps": lambda y: y.unfold(-1, 2, 3),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.ranks(1, 3)
def test_a_change_of_a_view_reaches_its_source(comm: Any, name: str) -> None:
    check_change_reaches_source(comm, VIEWS[name])


@pytest.mark.parametrize("name", MULTI_VIEW_FUNCTIONS)
@pytest.mark.ranks(1, 3)
def test_one_of_several_views_changes_its_source_and_shows_its_changes(comm: Any, name: str) -> None:
    check_change_reaches_source(comm, MULTI_VIEW_FUNCTIONS[name], recording=False)
    check_view_follows_source(comm, MULTI_VIEW_FUNCTIONS[name], recording=False)


@pytest.mark.parametrize("name", VIEWS | EXPANDED)
@pytest.mark.ranks(1, 3)
def test_a_view_shows_changes_of_its_source(comm: Any, name: str) -> None:
    check_view_follows_source(comm, (VIEWS | EXPANDED)[name])
