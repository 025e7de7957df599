"""Convolution of pieces: however the input is cut, the contributions of its pieces add up to torch's result."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from distconv.kernels.convolution import (
    Convolution,
    Geometry,
    Piece,
    assemble_input,
    crop,
    is_below_overlap_threshold,
    is_convolvable_without_copy,
    volume,
)

FORWARD = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A convolution, a part ``out`` of its output and cuts of its input, channels first, then along each dimension."""

    geometry: Geometry
    sizes: tuple[int, ...]
    groups: int
    out: tuple[tuple[int, int], ...]
    cuts: tuple[tuple[int, ...], ...]

    @property
    def outputs(self):
        g = self.geometry
        return tuple((n + 2 * g.padding[d] - g.reach(d)) // g.stride[d] + 1 for d, n in enumerate(self.sizes))

    def tensors(self):
        x = normal(2, 2 * self.groups, *self.sizes, seed=1)
        return x, normal(3 * self.groups, 2, *self.geometry.kernel, seed=2), normal(3 * self.groups, seed=3)

    def whole(self, x, w, b):
        g = self.geometry
        return FORWARD[len(self.sizes)](x, w, b, g.stride, g.padding, g.dilation, self.groups)

    def pieces(self, x):
        extents = (2 * self.groups, *self.sizes)
        ranges = [list(itertools.pairwise((0, *c, n))) for c, n in zip(self.cuts, extents, strict=True)]
        return [Piece(x[(..., *(slice(*r) for r in box))], box) for box in itertools.product(*ranges)]

    @property
    def work(self):
        return Convolution(self.geometry, self.groups, self.out, (0, 2 * self.groups))

    def view(self, y):
        return y[(..., *(slice(*o) for o in self.out))]


@st.composite
def cases(draw):
    count = draw(st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 5 if count < 3 else 3)) for _ in range(count))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(count))
    stride = tuple(draw(st.integers(1, 4)) for _ in range(count))
    geometry = Geometry(kernel, stride, tuple(draw(st.integers(0, 3)) for _ in range(count)), dilation)
    sizes = tuple(
        max(draw(st.integers(1, 11 if count < 3 else 5)), geometry.reach(d) - 2 * geometry.padding[d])
        for d in range(count)
    )
    case = Case(geometry, sizes, draw(st.integers(1, 2)), (), ())
    out = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in case.outputs]
    cuts = [(1,) if case.groups == 1 and draw(st.booleans()) else ()]
    cuts += [tuple(sorted(draw(st.lists(st.integers(0, n), max_size=2)))) for n in sizes]
    return Case(geometry, sizes, case.groups, tuple(map(tuple, out)), tuple(cuts))


MANY = settings(max_examples=60)


@MANY
@given(cases())
def test_the_pieces_of_the_input_add_up_to_the_whole_convolution(case):
    x, w, b = case.tensors()
    first, *rest = case.pieces(x)
    work = case.work
    if volume(case.out):
        y = work.add(work.forward(first, w, b), rest, w)
        torch.testing.assert_close(y, case.view(case.whole(x, w, b)), rtol=1e-12, atol=1e-12)


@MANY
@given(cases())
def test_gradients_of_the_pieces_are_those_of_the_whole(case):
    x, w, b = (t.requires_grad_() for t in case.tensors())
    y = case.view(case.whole(x, w, b))
    grad = normal(*y.shape, seed=4)
    if not volume(case.out):
        return
    y.backward(grad)
    work = case.work
    pieces = case.pieces(x.detach())
    for piece in pieces:
        expected = x.grad[(..., *(slice(*box) for box in piece.box))]
        found = work.input_gradient(grad, piece, w.detach())
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    dw, db = work.parameter_gradients(grad, pieces, w.detach(), bias=True)
    torch.testing.assert_close(dw, w.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(db, b.grad, rtol=1e-12, atol=1e-12)
    assert work.parameter_gradients(grad, pieces, w.detach(), bias=False)[1] is None


@MANY
@given(cases())
def test_the_merged_piece_gives_the_same(case):
    if not volume(case.out):
        return
    x, w, b = case.tensors()
    needed = tuple(case.geometry.needed(d, out) for d, out in enumerate(case.out))
    piece = assemble_input(case.pieces(x), ((0, 2 * case.groups), *needed))
    assert is_convolvable_without_copy(needed, case.out, case.geometry)
    y = case.work.forward(piece, w, b)
    torch.testing.assert_close(y, case.view(case.whole(x, w, b)), rtol=1e-12, atol=1e-12)


def test_merging_and_cutting_are_adjoint():
    pieces = [Piece(normal(1, 1, 4, seed=1), ((0, 1), (0, 4))), Piece(normal(1, 2, 3, seed=2), ((0, 2), (4, 7)))]
    whole = assemble_input(pieces, ((0, 2), (-2, 6)))
    other = Piece(normal(1, 2, 8, seed=3), ((0, 2), (-2, 6)))
    forward = float((whole.values * other.values).sum())
    backward = sum(float((p.values * crop(other, p.box)).sum()) for p in pieces)
    assert forward == pytest.approx(backward, rel=1e-13)


@pytest.mark.parametrize(
    ("box", "out", "free"),
    [
        (((0, 8),), ((0, 8),), True),
        (((3, 8),), ((3, 8),), True),
        (((3, 8),), ((2, 8),), False),
        (((0, 0),), ((0, 4),), False),
    ],
)
def test_a_block_needs_no_copy_where_equal_padding_on_both_sides_gives_its_outputs(box, out, free):
    assert is_convolvable_without_copy(box, out, Geometry((3,), (1,), (1,), (1,))) is free


def test_a_piece_that_touches_nothing_adds_nothing():
    work = Convolution(Geometry((3,), (1,), (1,), (1,)), 1, ((0, 3),), (0, 1))
    far, w = Piece(normal(1, 1, 2), ((0, 1), (8, 10))), normal(1, 1, 3)
    y = torch.zeros(1, 1, 3, dtype=torch.float64)
    assert not work.add(y, [far], w).any()
    assert not work.input_gradient(y + 1, far, w).any()
    dw, db = work.parameter_gradients(y + 1, [far], w, bias=True)
    assert not dw.any()
    assert db.tolist() == [3.0]


def test_work_is_little_by_its_multiplications():
    """2 x 32 x 32 outputs of 64 channels, 9 x 64 multiplications each, are 75.5 M; by channels 1.2 M."""
    block = (2, 64, 32, 32)
    assert not is_below_overlap_threshold(block, (64, 64, 3, 3), on_gpu=False)
    assert is_below_overlap_threshold(block, (32, 64, 3, 3), on_gpu=False) and not is_below_overlap_threshold(
        block, (32, 64, 3, 3), on_gpu=True
    )
    assert not is_below_overlap_threshold(block, (64, 1, 3, 3), on_gpu=True)
    assert is_below_overlap_threshold(block, (32, 1, 3, 3), on_gpu=True)
    assert is_below_overlap_threshold((2, 0, 4, 4), (3, 0, 3, 3), on_gpu=True)
