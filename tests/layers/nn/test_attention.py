"""Scaled dot-product attention, against one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.communication.transport import count_traffic
from tests.distconv.layouts import grid_over, normal
from tests.layers.compare import close, same_as_one_process, whole
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)

ATTENTION = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x * 2, x + 1),
    "masked attention": lambda x: F.scaled_dot_product_attention(x[:, :, :3], x, x, attn_mask=(x @ x.mT)[:1, :1, :3]),
    "attention to several": lambda x: F.scaled_dot_product_attention(x[0], x * 2, x + 1),
    "attention of one head to all": lambda x: F.scaled_dot_product_attention(x, x[:, :1], x[:1] + 1),
}


@pytest.mark.parametrize("name", ATTENTION)
@UP_TO_FOUR_RANKS
def test_attention_equals_one_process(comm, name):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, ATTENTION[name], normal(*SHAPE))


def attention_after_seed(attend):
    """``attend`` with dropout, from one seed, and a number drawn after it, which shows how many it used."""

    def call(x):
        torch.manual_seed(3)
        return attend(x) + torch.rand((), dtype=torch.float64)

    return call


_LOWER = torch.ones(7, 7, dtype=torch.bool).tril(-1)  # the first query attends to nothing

DROPOUT = {
    "dropout": lambda x: F.scaled_dot_product_attention(x, x * 2, x + 1, dropout_p=0.3),
    "dropout of all": lambda x: F.scaled_dot_product_attention(x, x * 2, x + 1, dropout_p=1.0),
    "causal": lambda x: F.scaled_dot_product_attention(x, x * 2, x + 1, dropout_p=0.3, is_causal=True),
    "masked": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=_LOWER, dropout_p=0.5),
    "added": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=(x @ x.mT)[:1, :1], dropout_p=0.5, scale=0.3),
    "of one head to all": lambda x: F.scaled_dot_product_attention(x, x[:, :1], x[:1] + 1, dropout_p=0.3),
    "grouped": lambda x: F.scaled_dot_product_attention(x, x[:, :2], x[:, 2:], dropout_p=0.3, enable_gqa=True),
    "to several": lambda x: F.scaled_dot_product_attention(x[0], x * 2, x + 1, dropout_p=0.3),
}


@pytest.mark.filterwarnings("error::distconv.ReplicationWarning")
@pytest.mark.parametrize("name", DROPOUT)
@UP_TO_FOUR_RANKS
def test_attention_with_dropout_equals_one_process(comm, name):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, attention_after_seed(DROPOUT[name]), normal(*SHAPE))


class Decoder(nn.TransformerDecoderLayer):
    def forward(self, x):
        return super().forward(x, x * 2)


MODULES = {
    "attention of a sequence first": (lambda: nn.MultiheadAttention(8, 2), {"need_weights": False}),
    "an encoder with dropout": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True), None),
    "attention with dropout": (lambda: nn.MultiheadAttention(8, 4, dropout=0.3, batch_first=True), {}),
    "a decoder with dropout": (lambda: Decoder(8, 2, 16, dropout=0.3, batch_first=True), None),
}


@pytest.mark.filterwarnings("error::distconv.ReplicationWarning")
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("axis", "nhc")
@pytest.mark.ranks(1, 2, 4)
def test_modules_of_attention_equal_one_process_and_gather_nothing_unasked(comm, axis, name):
    """Projections, heads and the way back are torch's own Python; its views merge heads with samples."""
    build, options = MODULES[name]
    torch.manual_seed(0)
    module = build().double()
    split = dc.parallelize(copy.deepcopy(module), grid_over(comm, **{axis: comm.size}))
    x = normal(5, 6, 8).requires_grad_()
    y = dc.scatter(x.detach(), grid_over(comm, **{axis: comm.size}), dims="nhc").requires_grad_()

    def attend(m, t):
        torch.manual_seed(3)
        return m(t) if options is None else m(t, t * 2, t + 1, **options)[0]

    expected, found = attend(module, x), attend(split, y)
    close(dc.gather(found.detach()), expected.detach(), name)
    expected.square().sum().backward()
    found.square().sum().backward()
    close(dc.gather(y.grad), x.grad, name)
    for (what, wanted), (_, given) in zip(module.named_parameters(), split.named_parameters(), strict=True):
        close(whole(given.grad), wanted.grad, what)


@pytest.mark.ranks(2, 4)
def test_samples_that_divide_stay_where_they_are_attended_to(comm):
    torch.manual_seed(0)
    grid = grid_over(comm, n=comm.size)
    module = dc.parallelize(nn.MultiheadAttention(8, 2, batch_first=True).double(), grid)
    x = dc.scatter(normal(8, 6, 8), grid, dims="nhc")
    with count_traffic() as traffic:
        y, _ = module(x, x, x, need_weights=False)
    assert y.dist == x.dist and not sum(traffic.sent.values())


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_in_evaluation_puts_zeros_where_torch_does(comm, norm):
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(6) if norm else None).double().eval()
    x, padding = normal(5, 7, 6), torch.arange(7)[None] >= torch.tensor([7, 3, 5, 1, 6])[:, None]
    later = torch.triu(torch.ones(7, 7), 1).bool()
    calls = [(None, padding), (later, padding), (None, padding.flip(1)), (None, None)]
    for grid in (grid_over(comm, **{axis: comm.size}) for axis in "nh"):
        spread, given = dc.parallelize(copy.deepcopy(encoder), grid), dc.scatter(x, grid, dims="nh-")
        for mask, padded in calls:
            with torch.no_grad():
                close(whole(spread(given, mask, padded)), encoder(x, mask, padded), f"{norm} {mask} {padded}")
        close(whole(spread(given, None, padding)), encoder(x, None, padding).detach(), "with gradients")


def test_a_mask_is_left_aligned_if_no_position_is_kept_after_a_gap(comm):
    x = dc.scatter(normal(3, 4, 5), grid_over(comm, n=comm.size))
    for rows, aligned in (
        ([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], True),
        ([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0]], False),
        ([[0, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]], False),
    ):
        assert torch._nested_tensor_from_mask_left_aligned(x, torch.tensor(rows).bool()) is aligned


@pytest.mark.ranks(2, 3, 4)
def test_keys_and_values_are_gathered_and_their_gradients_scattered_once(comm):
    x = dc.scatter(normal(2, 3, 12, 5), grid_over(comm, h=comm.size))
    query, key, value = (t.detach().requires_grad_() for t in (x, x * 2, x + 1))
    with count_traffic() as forward:
        y = F.scaled_dot_product_attention(query, key, value).sum()
    with count_traffic() as backward:
        y.backward()
    for traffic in forward, backward:
        # Each of the others needs, or adds to, what this rank has of keys and values: no way needs less.
        assert sum(traffic.sent.values()) == (comm.size - 1) * 2 * x.local.numel() * 8
    assert not backward.reduced
