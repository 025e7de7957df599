"""Matrix products: linear layers, matmul and its kin, attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from distconv.jobs.verification.conformance.case import Case, Input, case, modules, plain

_ROWS = Input("N C")
_X = Input("N C H W")


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Non-local block over the pixels."""
    q, k, v = (t.flatten(2) for t in (q, k, v))
    weights = torch.softmax(torch.bmm(q.transpose(1, 2), k), -1)
    return torch.bmm(v, weights.transpose(1, 2))


CASES: tuple[Case, ...] = (
    case("linear", "features", F.linear, _ROWS, plain("7 c"), plain("7")),
    case("linear", "no bias", lambda x, w: F.linear(x, w), _ROWS, plain("7 c")),
    case("linear", "last of four dimensions", lambda x, w: F.linear(x, w), _X, plain("7 w")),
    case("linear", "of permuted channels", lambda x, w: F.linear(x.permute(0, 2, 3, 1), w), _X, plain("7 c")),
    *modules("nn.Linear", "features", lambda sizes: nn.Linear(sizes["c"], 6), _ROWS),
    *modules("nn.Linear", "no bias", lambda sizes: nn.Linear(sizes["c"], 6, bias=False), _ROWS),
    *modules(
        "nn.Linear",
        "after flatten",
        lambda sizes: nn.Linear(sizes["c"] * sizes["h"] * sizes["w"], 3),
        _X,
        function=lambda module, x: module(x.flatten(1)),
    ),
    *modules(
        "nn.Linear",
        "after global pooling",
        lambda sizes: nn.Linear(sizes["c"], 3),
        _X,
        function=lambda module, x: module(F.adaptive_avg_pool2d(x, 1).flatten(1)),
    ),
    case("bilinear", "", lambda a, b, w: F.bilinear(a, b, w), _ROWS, _ROWS, plain("3 c c")),
    case("matmul", "by a plain matrix", lambda x, w: x @ w, _ROWS, plain("c 5")),
    case("matmul", "of planes by a plain matrix", lambda x, w: torch.matmul(x, w), _X, plain("w 5")),
    case("matmul", "a plain matrix first", lambda x, w: w @ x, _X, plain("5 h")),
    case("matmul", "of planes", lambda a, b: a @ b.transpose(-1, -2), _X, _X),
    case("mm", "samples by samples", lambda a, b: torch.mm(a, b.transpose(0, 1)), _ROWS, _ROWS),
    case("bmm", "", lambda a, b: torch.bmm(a, b.transpose(1, 2)), Input("N C W"), Input("N C W")),
    case("addmm", "", lambda x, w, b: torch.addmm(b, x, w), _ROWS, plain("c 5"), plain("5")),
    case("baddbmm", "", lambda a, b: torch.baddbmm(a, a, b), Input("N C W"), plain("n w w")),
    case("mv", "", lambda x, v: torch.mv(x, v), _ROWS, plain("c")),
    case("outer", "of means", lambda a, b: torch.outer(a.mean((0, 2, 3)), b.mean((0, 2, 3))), _X, _X),
    case("dot", "of means", lambda a, b: torch.dot(a.mean((0, 2, 3)), b.mean((0, 2, 3))), _X, _X),
    case("einsum", "nchw,fc->nfhw", lambda x, w: torch.einsum("nchw,fc->nfhw", x, w), _X, plain("5 c")),
    case("einsum", "nchw,nchw->nc", lambda a, b: torch.einsum("nchw,nchw->nc", a, b), _X, _X),
    case("tensordot", "C", lambda x, w: torch.tensordot(x, w, ([1], [0])), _X, plain("c 5")),
    case("attention", "over the pixels", _attention, _X, _X, _X),
    case(
        "scaled_dot_product_attention",
        "over the pixels",
        lambda q: F.scaled_dot_product_attention(*(q.flatten(2).transpose(1, 2),) * 3),
        _X,
    ),
    case("cosine_similarity", "C", lambda a, b: F.cosine_similarity(a, b), _X, _X),
    case("pairwise_distance", "", lambda a, b: F.pairwise_distance(a, b), _ROWS, _ROWS),
    case("embedding", "", lambda i, w: F.embedding(i, w), Input("N H W", "classes"), plain("c 3")),
)
