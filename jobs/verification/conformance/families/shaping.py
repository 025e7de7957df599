"""Operators that only move elements, or pick some of them: shapes, slices, joins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distconv.jobs.verification.conformance.case import Case, Input, case, plain

_X = Input("N C H W")

_OF_ONE: dict[tuple[str, str], Callable[[torch.Tensor], Any]] = {
    ("flatten", "1"): lambda x: x.flatten(1),
    ("flatten", "H, W"): lambda x: torch.flatten(x, 2),
    ("flatten", "N, C"): lambda x: x.flatten(0, 1),
    ("view", "(n, -1)"): lambda x: x.view(x.shape[0], -1),
    ("view", "groups of channels"): lambda x: x.view(x.shape[0], 2, -1, *x.shape[2:]),
    ("view_as", ""): lambda x: x.view_as(x * 2),
    ("reshape", "(n, c, -1)"): lambda x: x.reshape(*x.shape[:2], -1),
    ("reshape", "(n c, 1, h, w)"): lambda x: x.reshape(-1, 1, *x.shape[2:]),
    ("reshape", "channels and rows"): lambda x: x.reshape(x.shape[0], -1, x.shape[3]),
    ("reshape_as", ""): lambda x: x.flatten(1).reshape_as(x),
    ("unflatten", "C"): lambda x: x.unflatten(1, (2, -1)),
    ("unsqueeze", "0"): lambda x: x.unsqueeze(0),
    ("unsqueeze", "-1"): lambda x: torch.unsqueeze(x, -1),
    ("squeeze", "nothing"): lambda x: x.squeeze(),
    ("squeeze", "a mean"): lambda x: x.mean(1, keepdim=True).squeeze(1),
    ("permute", "N H W C"): lambda x: x.permute(0, 2, 3, 1),
    ("permute", "W H C N"): lambda x: torch.permute(x, (3, 2, 1, 0)),
    ("transpose", "H, W"): lambda x: x.transpose(2, 3),
    ("transpose", "N, C"): lambda x: torch.transpose(x, 0, 1),
    ("swapaxes", "C, W"): lambda x: x.swapaxes(1, -1),
    ("movedim", "C last"): lambda x: torch.movedim(x, 1, -1),
    ("mT", ""): lambda x: x.mT,
    ("expand", "a new dimension"): lambda x: x.unsqueeze(0).expand(2, -1, -1, -1, -1),
    ("expand", "a mean over C"): lambda x: x.mean(1, keepdim=True).expand(-1, 3, -1, -1),
    ("expand_as", ""): lambda x: x.mean((2, 3), keepdim=True).expand_as(x),
    ("broadcast_to", ""): lambda x: torch.broadcast_to(x.mean((2, 3), keepdim=True), x.shape),
    ("repeat", "C twice, W thrice"): lambda x: x.repeat(1, 2, 1, 3),
    ("tile", "W twice"): lambda x: x.tile((1, 1, 1, 2)),
    ("repeat_interleave", "W twice"): lambda x: x.repeat_interleave(2, 3),
    ("repeat_interleave", "C twice"): lambda x: torch.repeat_interleave(x, 2, dim=1),
    ("narrow", "W"): lambda x: x.narrow(3, 2, 4),
    ("narrow", "C"): lambda x: x.narrow(1, 1, 1),
    ("select", "C"): lambda x: x.select(1, 1),
    ("select", "H"): lambda x: x.select(2, -1),
    ("getitem", "[:, 0]"): lambda x: x[:, 0],
    ("getitem", "[:, -1:]"): lambda x: x[:, -1:],
    ("getitem", "[1:]"): lambda x: x[:1],
    ("getitem", "[..., ::2]"): lambda x: x[..., ::2],
    ("getitem", "[:, None, ..., 1:-1, 2:]"): lambda x: x[:, None, ..., :-1, 2:],
    ("getitem", "a list"): lambda x: x[:, [0, 1, 0]],
    ("getitem", "a mask"): lambda x: x[x > 0],
    ("index_select", "C"): lambda x: x.index_select(1, torch.tensor([1, 0, 1])),
    ("gather", "W"): lambda x: x.gather(3, torch.zeros(x.shape, dtype=torch.int64)),
    ("take_along_dim", "W"): lambda x: torch.take_along_dim(x, torch.zeros(x.shape, dtype=torch.int64), 3),
    ("chunk", "C in 2"): lambda x: x.chunk(2, 1),
    ("chunk", "W in 3"): lambda x: torch.chunk(x, 3, 3),
    ("split", "C by 1"): lambda x: x.split(1, 1),
    ("split", "W in (2, 3, rest)"): lambda x: torch.split(x, [2, 3, x.shape[3] - 5], 3),
    ("tensor_split", "C in 2"): lambda x: torch.tensor_split(x, 2, 1),
    ("unbind", "C"): lambda x: x.unbind(1),
    ("unbind", "N"): lambda x: torch.unbind(x),
    ("iteration", "over samples"): lambda x: tuple(x),
    ("unfold", "W by windows of 2"): lambda x: x.unfold(3, 2, 1),
    ("contiguous", "after a transposition"): lambda x: x.transpose(1, 3).contiguous() * 2,
    ("T", "of rows"): lambda x: (x.mean((2, 3)).T, x.mean((2, 3)).t(), x.mean((2, 3)).adjoint(), x.mH),
    ("moveaxis", "C last"): lambda x: torch.moveaxis(x, 1, -1),
    ("ravel", ""): lambda x: x.ravel(),
    ("fliplr, flipud", ""): lambda x: (torch.fliplr(x), torch.flipud(x)),
    ("hsplit, vsplit, dsplit", "by 1"): lambda x: (*x.hsplit([1]), *x.vsplit([1]), *torch.dsplit(x, [1])),
    ("split_with_sizes", "W"): lambda x: torch.split_with_sizes(x, [1, x.shape[3] - 1], 3),
    ("sum_to_size", "one row"): lambda x: x.sum_to_size(x.shape[0], x.shape[1], 1, x.shape[3]),
    ("triu, tril", ""): lambda x: (x.triu(1), torch.tril(x)),
    ("atleast_3d", ""): lambda x: torch.atleast_3d(x),
    ("broadcast_tensors", ""): lambda x: torch.broadcast_tensors(x, x.mean(1, keepdim=True)),
    ("unsqueeze_, squeeze_, transpose_", ""): lambda x: (x * 1).unsqueeze_(0).squeeze_(0).transpose_(2, 3),
    ("reversed, in", ""): lambda x: (reversed(x), x * float(x[0, 0, 0, 0].item() in x.detach())),
    ("as_strided", ""): lambda x: x.as_strided((2, 2), (1, 1)),
    ("affine_grid", ""): lambda x: torch.nn.functional.affine_grid(
        x.mean((2, 3))[:, :1, None].expand(-1, 2, 3), [x.shape[0], 1, 2, 3]
    ),
    ("fold", "of unfold"): lambda x: torch.nn.functional.fold(torch.nn.functional.unfold(x, 2), x.shape[2:], 2),
    ("diagonal", "H, W"): lambda x: x.diagonal(dim1=2, dim2=3),
    ("arange", "plain coordinates"): lambda x: x + torch.arange(x.shape[3]) * torch.arange(x.shape[2])[:, None],
    ("one_hot", "of argmax"): lambda x: torch.nn.functional.one_hot(x.argmax(1), x.shape[1]),
}

_OF_TWO: dict[tuple[str, str], Callable[[torch.Tensor, torch.Tensor], Any]] = {
    ("cat", "C"): lambda a, b: torch.cat([a, b], 1),
    ("cat", "N"): lambda a, b: torch.cat([a, b]),
    ("cat", "W"): lambda a, b: torch.cat((a, b, a), 3),
    ("concat", "H"): lambda a, b: torch.concat([a, b], -2),
    ("stack", "0"): lambda a, b: torch.stack([a, b]),
    ("stack", "-1"): lambda a, b: torch.stack([a, b, a], -1),
    ("hstack", ""): lambda a, b: torch.hstack([a, b]),
    ("vstack, dstack, column_stack", ""): lambda a, b: (
        torch.vstack([a, b]),
        torch.dstack([a, b]),
        torch.column_stack([a, b]),
    ),
}

_SECONDS = {
    "another number of channels": Input("N C+2 H W"),
    "balanced": Input("N C H W", layout="balanced"),
    "replicated": Input("N C H W", layout="whole"),
    "plain": plain("n c h w"),
    "without gradient": Input("N C H W", grad=False),
}

_LEAST = {"h": 2, "w": 6}

CASES: tuple[Case, ...] = (
    *(case(name, option, function, _X, multiple=2, least=_LEAST) for (name, option), function in _OF_ONE.items()),
    *(case(name, option, function, _X, _X) for (name, option), function in _OF_TWO.items()),
    *(case("cat", f"C, second {name}", lambda a, b: torch.cat([a, b], 1), _X, b) for name, b in _SECONDS.items()),
    case("cat", "W, second balanced", lambda a, b: torch.cat([a, b], 3), _X, _SECONDS["balanced"]),
    case("cat", "C, plain first", lambda a, b: torch.cat([b, a], 1), _X, plain("n c h w")),
    case("stack", "1, second plain", lambda a, b: torch.stack([a, b], 1), _X, plain("n c h w")),
    case(
        "cat",
        "skip connection, cropped",
        lambda a, b: torch.cat([a[:, :, 1 : 1 + b.shape[2], 2 : 2 + b.shape[3]], b], 1),
        *(_X, Input("N C H-2 W-4")),
        least={"h": 3, "w": 5},
    ),
    case("masked_select", "", lambda x, m: x.masked_select(m), _X, Input("N C H W", "bool")),
)
