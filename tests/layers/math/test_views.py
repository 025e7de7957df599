"""Views of diagonals and of parts of complex tensors: in-place changes show in both the view and its source."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.layers.views import View, check_change_reaches_source, check_view_follows_source

VIEWS: dict[str, View] = {
    "diagonal": lambda y: y.diagonal(),
    "diagonal above": lambda y: torch.diagonal(y, 1),
    "diagonal below of other dimensions": lambda y: y.diagonal(-1, 1, 2),
    "diagonal from the end": lambda y: torch.diagonal(y, 0, -1, -3),
    "linalg.diagonal": lambda y: torch.linalg.diagonal(y),
    "linalg.diagonal above": lambda y: torch.linalg.diagonal(y, offset=2),
    "linalg.diagonal of other dimensions": lambda y: torch.linalg.diagonal(y, dim1=0, dim2=2),
    "view_as_complex and back": lambda y: torch.view_as_real(torch.view_as_complex(y.view(3, 4, 3, 5, 2))),
    "real": lambda y: torch.view_as_complex(y.view(3, 4, 3, 5, 2)).real,
    "torch.real": lambda y: torch.real(torch.view_as_complex(y.view(3, 4, 3, 5, 2))),
    "imag": lambda y: torch.view_as_complex(y.view(3, 4, 3, 5, 2)).imag,
    "real of real": lambda y: torch.real(y),
    "conj of real": lambda y: y.conj(),
    "resolve_conj": lambda y: y.resolve_conj(),
    "resolve_neg": lambda y: torch.resolve_neg(y),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.ranks(1, 3)
def test_a_change_of_a_view_reaches_its_source(comm: Any, name: str) -> None:
    check_change_reaches_source(comm, VIEWS[name])


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.ranks(1, 3)
def test_a_view_shows_changes_of_its_source(comm: Any, name: str) -> None:
    check_view_follows_source(comm, VIEWS[name])
