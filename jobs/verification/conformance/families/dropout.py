"""Dropout: the mask is the one that torch draws in one process from the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.conformance.case import Case, Input, case, modules

_X = Input("N C H W")


def _trained(function: Callable[..., Any], x: Input = _X) -> Case:
    return case(function.__name__, "p=0.4, training", lambda t: function(t, 0.4, training=True), x)


def _twice(x: torch.Tensor) -> torch.Tensor:
    """Two masks, one after the other, with another random number between them."""
    return F.dropout(F.dropout(x, 0.3) + torch.rand(()), 0.3)


CASES: tuple[Case, ...] = (
    _trained(F.dropout),
    _trained(F.dropout1d, Input("N C W")),
    _trained(F.dropout2d),
    _trained(F.dropout3d, Input("N C D H W")),
    _trained(F.alpha_dropout),
    _trained(F.feature_alpha_dropout),
    case("dropout", "p=0", lambda x: F.dropout(x, 0.0), _X),
    case("dropout", "p=1", lambda x: F.dropout(x, 1.0), _X),
    case("dropout", "evaluation", lambda x: F.dropout(x, 0.4, training=False), _X),
    case("dropout", "in place", lambda x: F.dropout(x * 1, 0.4, inplace=True), _X),
    case("dropout", "twice", _twice, _X),
    case("dropout", "of tokens", lambda x: F.dropout(x.flatten(2).transpose(1, 2), 0.4), _X),
    case("dropout", "of permuted dimensions", lambda x: F.dropout(x.permute(0, 2, 3, 1).sin(), 0.4), _X),
    case("dropout", "channels_last", lambda x: F.dropout(x.to(memory_format=torch.channels_last), 0.4), _X),
    case("randn_like", "of some channels, transposed", lambda x: x[:, 1:].mT + torch.randn_like(x[:, 1:].mT), _X),
    *modules("nn.Dropout", "training", lambda sizes: nn.Dropout(0.4), _X)[:1],
    *modules("nn.Dropout", "evaluation", lambda sizes: nn.Dropout(0.4).eval(), _X)[:1],
    *modules("nn.Dropout2d", "training", lambda sizes: nn.Dropout2d(0.4), _X)[:1],
    case("rrelu", "training", lambda x: F.rrelu(x, training=True), _X),
    case("rrelu", "evaluation", lambda x: F.rrelu(x, training=False), _X),
    case("bernoulli", "of probabilities", lambda x: torch.bernoulli(x), Input("N C H W", "unit", grad=False)),
    *(
        case(name, "in place", lambda x, name=name: getattr(x * 0 + 0.5, name)() * x, _X)
        for name in ("uniform_", "normal_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "random_")
    ),
    case("randint_like", "below 5", lambda x: x * torch.randint_like(x, 5), _X),
    case("rand_like", "", lambda x: x * torch.rand_like(x), _X),
    case("randn_like", "", lambda x: x + torch.randn_like(x), _X),
)
