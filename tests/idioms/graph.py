"""Edges, seeds and hooks of autograd's graph; packed sequences, and encoders in evaluation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge

import distconv as dc
from tests.distconv.layouts import normal
from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom

LENGTHS = torch.tensor([7, 3, 5, 1, 6])
PADDING = torch.arange(7)[None] >= LENGTHS[:, None]


# -- edges and seeds --------------------------------------------------------------------------------------------------


@idiom(quick=True)
def a_gradient_is_asked_for_by_its_edge(b: Bench) -> Found:
    h = b.model.begin(b.images())
    (first,) = torch.autograd.grad((h * h).sum(), get_gradient_edge(h), retain_graph=True)
    whole = h if b.grid is None else dc.gather(h)
    (second,) = torch.autograd.grad([(whole**3).sum()], [get_gradient_edge(h)])
    return {"first": first, "second": second, "shape": torch.tensor(first.shape)}


@idiom()
def a_gradient_enters_at_an_edge(b: Bench) -> Found:
    """Two halves of a network, each with a backward pass of its own."""
    h = b.model.begin(b.images())
    edge = get_gradient_edge(h)
    (dw,) = torch.autograd.grad(edge, [b.model.first.weight], b.images(3, 7), retain_graph=True)
    torch.autograd.backward(edge, b.images(4, 7))
    return {"dw": dw} | b.gradients()


@idiom()
def several_tensors_go_back_at_once(b: Bench) -> Found:
    x = b.images().requires_grad_()
    h = b.model.begin(x)
    torch.autograd.backward([h, (h**2).sum()], [b.images(4, 7), None], retain_graph=True)
    torch.autograd.backward((h**2).sum(), inputs=[x, b.model.first.weight])
    return b.gradients() | {"dL/dx": x.grad}


@idiom()
def a_plain_tensor_gets_a_distributed_gradient(b: Bench) -> Found:
    p = torch.zeros(5, 3, 7, 9, dtype=torch.float64, requires_grad=True)
    q = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (p * 2).backward(gradient=b.images())
    torch.autograd.backward([p * 3], [b.images()])
    q.backward(gradient=b.images().mean((0, 2, 3)))
    return {"p": p.grad, "q": q.grad, "again": torch.autograd.grad(p * 2, p, b.images())[0]}


# -- hooks ------------------------------------------------------------------------------------------------------------


def seen_in_a_hook(b: Bench, register: Any) -> Found:
    """All gradients of weights that there are when the hook that ``register`` registers is called."""
    seen: Found = {}

    def look(*_: Any) -> None:
        seen.update({n: p.grad.clone() for n, p in b.model.named_parameters() if p.grad is not None})

    register(look)
    for seed in range(2):
        b.loss(seed).backward()
    return seen | b.gradients()


@idiom(quick=True)
def a_hook_behind_a_gradient_sees_those_of_later_layers(b: Bench) -> Found:
    return seen_in_a_hook(b, b.model.first.weight.register_post_accumulate_grad_hook)


@idiom()
def a_hook_of_a_layer_sees_gradients_of_later_layers(b: Bench) -> Found:
    return seen_in_a_hook(b, b.model.first.register_full_backward_hook)


@idiom()
def a_hook_gives_up_a_gradient_that_is_on_its_way(b: Bench) -> Found:
    def forget(_: torch.Tensor) -> None:
        b.model.head.weight.grad = None

    b.model.first.weight.register_hook(forget)
    b.loss().backward()
    return b.gradients()


# -- packed sequences, padded places ----------------------------------------------------------------------------------


def packed(b: Bench, kind: Any, **options: Any) -> Found:
    """Rows of features as sequences of several lengths."""
    conv = b.made(lambda: nn.Conv2d(3, 4, 3, padding=1))
    rnn = b.made(lambda: kind(36, 5, batch_first=True, **options), 6)
    x = conv(b.images()).permute(0, 2, 1, 3).flatten(2)
    sequences = nn.utils.rnn.pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)
    y, last = rnn(sequences)
    y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True)
    ((y**2).sum() + (last**3).sum()).backward()
    return b.gradients(conv) | {f"of rnn {n}": g for n, g in b.gradients(rnn).items()} | {"y": y, "last": last}


@idiom(quick=True)
def packed_sequences_go_through_a_gru(b: Bench) -> Found:
    return packed(b, nn.GRU)


@idiom()
def packed_sequences_go_through_a_deep_rnn_both_ways(b: Bench) -> Found:
    return packed(b, nn.RNN, num_layers=2, bidirectional=True)


@idiom()
def packed_sequences_go_through_a_scanned_gru(b: Bench) -> Found:
    from distconv.layers.recurrent import ScanGRU

    return packed(b, ScanGRU)


def encoder(norm: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(6, bias=True) if norm else None).eval()


def tokens(b: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    return b.place(normal(5, 7, 6), ("n", "h", "c")), b.place(PADDING, ("n", "h"))


@idiom(quick=True)
def an_encoder_in_evaluation_skips_padded_places(b: Bench) -> Found:
    plain, normed = b.made(lambda: encoder(False)), b.made(lambda: encoder(True))
    x, padding = tokens(b)
    with torch.no_grad():
        found = {"plain": plain(x, src_key_padding_mask=PADDING), "normed": normed(x, src_key_padding_mask=padding)}
        found["masked"] = normed(x, torch.triu(torch.ones(7, 7), 1).bool(), padding)
        found["not left"] = normed(x, src_key_padding_mask=padding.flip(1))
    return found | {"with gradients": normed(x, src_key_padding_mask=padding)}


@idiom()
def a_decoder_attends_to_padded_places_of_an_encoder(b: Bench) -> Found:
    model = b.made(lambda: nn.Transformer(6, 2, 1, 1, 8, batch_first=True)).eval()
    x, padding = tokens(b)
    with torch.no_grad():
        return {"y": F.relu(model(x, x, src_key_padding_mask=padding))}
