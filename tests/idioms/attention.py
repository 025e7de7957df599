"""Attention over places, windows and channels."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.distconv.layouts import normal
from tests.idioms.bench import Bench, Found
from tests.idioms.layers import Layer, trained
from tests.idioms.table import idiom


@idiom(quick=True)
def attention_over_all_places(b: Bench) -> Found:
    def attend(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        q, k, v = m.qkv(x.flatten(2).transpose(1, 2)).reshape(n, h * w, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, h * w, c)
        return x + m.out(y).transpose(1, 2).view(n, c, h, w)

    return trained(b, lambda: Layer(attend, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8)))


@idiom()
def attention_written_by_hand_with_a_bias_of_places(b: Bench) -> Found:
    def attend(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        tokens = m.norm(x.flatten(2).transpose(-2, -1))
        q, k, v = m.qkv(tokens).chunk(3, dim=-1)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1)) + m.bias[:63, :63]
        y = F.dropout(scores.softmax(dim=-1), 0.1) @ v
        return y.mT.reshape(x.shape)

    return trained(
        b, lambda: Layer(attend, norm=nn.LayerNorm(8), qkv=nn.Linear(8, 24), bias=0.1 * normal(70, 70, seed=1))
    )


@idiom()
def multi_head_attention_of_torch(b: Bench) -> Found:
    def attend(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).permute(2, 0, 1)
        y, weights = m.attention(tokens, tokens, tokens, need_weights=True)
        return (tokens + y).permute(1, 2, 0).view_as(x) * weights.sum()

    return trained(b, lambda: Layer(attend, attention=nn.MultiheadAttention(8, 2, dropout=0.1)))


@idiom()
def a_transformer_layer_of_torch(b: Bench) -> Found:
    def encode(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m.layer(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)

    return trained(b, lambda: Layer(encode, layer=nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)))


@idiom()
def a_class_token_and_learned_places(b: Bench) -> Found:
    """The vision transformer: patches, a token, embedded places, the token's result."""

    def encode(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        tokens = m.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat((m.token.expand(x.size(0), -1, -1), tokens), dim=1) + m.places
        tokens = F.dropout(tokens, 0.1)
        y, _ = m.attention(tokens, tokens, tokens, need_weights=False)
        return (tokens + y)[:, 0].view(-1, 8, 1, 1) * x

    return trained(
        b,
        lambda: Layer(
            encode, patches=nn.Conv2d(8, 8, 2, 2), token=0.1 * normal(1, 1, 8), places=0.1 * normal(1, 13, 8),
            attention=nn.MultiheadAttention(8, 4, batch_first=True),
        ),
    )  # fmt: skip


@idiom()
def attention_between_channels(b: Bench) -> Found:
    """XCiT, Restormer: transposed attention with learned temperatures."""

    def attend(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        q, k, v = m.qkv(x).flatten(2).chunk(3, dim=1)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return (((q @ k.transpose(-2, -1)) * m.temperature).softmax(-1) @ v).view(x.shape)

    return trained(b, lambda: Layer(attend, qkv=nn.Conv2d(8, 24, 1), temperature=torch.ones(1, 1, 1)))


@idiom()
def windows_shifted_by_rolls(b: Bench) -> Found:
    """Swin: pad, roll, partition, attend with a table of biases and a mask, and all of it back."""

    def attend(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        x = F.pad(x.permute(0, 2, 3, 1), (0, 0, 0, 3, 0, 1)).roll((-2, -2), (1, 2))
        windows = x.view(n, 2, 4, 3, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        q, k, v = m.qkv(windows).view(-1, 16, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        place = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        apart = place[:, :, None] - place[:, None, :] + 3
        bias = m.table[(apart[0] * 7 + apart[1]).view(-1)].view(16, 16, 2).permute(2, 0, 1)
        scores = q @ k.transpose(-2, -1) + bias.unsqueeze(0)
        region = torch.zeros(1, 8, 12, 1)
        region[:, -4:-2], region[:, -2:], region[:, :, -2:] = 1, 2, 3
        region = region.view(1, 2, 4, 3, 4, 1).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16)
        mask = (region[:, None] != region[:, :, None]).double() * -100.0
        scores = (scores.view(n, 6, 2, 16, 16) + mask.view(1, 6, 1, 16, 16)).view(-1, 2, 16, 16)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 16, c)
        y = y.view(n, 2, 3, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(n, 8, 12, c).roll((2, 2), (1, 2))
        return y[:, :h, :w].permute(0, 3, 1, 2).contiguous()

    return trained(b, lambda: Layer(attend, qkv=nn.Linear(8, 24), table=0.1 * normal(49, 2)))


@idiom()
def places_pool_the_whole_context(b: Bench) -> Found:
    """GCNet: a softmax over all places weighs the features."""

    def pool(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        mask = m.mask(x).view(x.size(0), 1, -1).softmax(2)
        context = torch.matmul(x.view(x.size(0), 1, x.size(1), -1), mask.unsqueeze(-1)).view(-1, 8, 1, 1)
        return x + m.transform(context)

    return trained(b, lambda: Layer(pool, mask=nn.Conv2d(8, 1, 1), transform=nn.Conv2d(8, 8, 1)))


@idiom()
def queries_read_the_features(b: Bench) -> Found:
    """A decoder with learned queries, as DETR's, and masks by products, as MaskFormer's."""

    def decode(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        queries = m.queries.unsqueeze(0).repeat(x.size(0), 1, 1)
        read = m.decoder(queries, x.flatten(2).transpose(1, 2))
        return torch.einsum("bqc,bchw->bqhw", read, x)

    return trained(
        b,
        lambda: Layer(
            decode, queries=normal(4, 8), decoder=nn.TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True)
        ),
    )


@idiom()
def places_are_sines_and_cosines(b: Bench) -> Found:
    def add(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        rows = torch.ones(x.size(0), *x.shape[2:]).cumsum(1, dtype=torch.float64) / 7 * 2 * math.pi
        steps = 10000 ** (2 * torch.arange(4, dtype=torch.float64, device=x.device).div(2).floor() / 4)
        turned = rows[..., None] / steps
        sines = torch.stack((turned[..., 0::2].sin(), turned[..., 1::2].cos()), dim=4).flatten(3)
        return x + torch.cat([sines, sines.flip(1)], dim=3).permute(0, 3, 1, 2)

    return trained(b, lambda: Layer(add))


@idiom()
def pairs_of_channels_are_rotated(b: Bench) -> Found:
    """Rotary embeddings."""

    def rotate(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        angles = torch.outer(torch.arange(63).double(), 0.1 ** torch.arange(4).double())
        cosine, sine = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        first, second = tokens.chunk(2, -1)
        return (tokens * cosine + torch.cat((-second, first), -1) * sine).transpose(1, 2).reshape(x.shape)

    return trained(b, lambda: Layer(rotate))
