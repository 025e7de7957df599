"""Convolution of a piece of the input: what one rank computes by itself.

A convolution is linear, so a block of its output is the sum of what each piece of the needed input (the owned block,
the strips and channels received from others) contributes. A piece is a tensor with the global box it covers; all of
the geometry is computed from the output range back to the input range, so stride, dilation, even kernels and any
padding are one rule.

Source: Dryden et al. 2019, II-A (eqs. 1-3), III-A and, for channels, III-D.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

Range = tuple[int, int]
"""Half-open range of global indices of a dimension."""

LITTLE, LITTLE_ON_GPU = 1 << 26, 1 << 20
"""Multiplications up to which calling torch once more costs more than a copy of the input, and hides no message.

On a CPU messages stand still while torch computes, so that nothing is lost if they are waited for first.
"""

CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
"""By their number of spatial dimensions."""


@dataclass(frozen=True)
class Geometry:
    """Spatial geometry of a convolution or pooling, one entry per spatial dimension; ``padding`` is that in front."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def reach(self, dim: int) -> int:
        """Input indices from the first to the last that a window touches."""
        return (self.kernel[dim] - 1) * self.dilation[dim] + 1

    def needed(self, dim: int, out: Range) -> Range:
        """Input range, padding included, that the outputs ``out`` are computed from."""
        if out[0] >= out[1]:
            return (0, 0)
        start = out[0] * self.stride[dim] - self.padding[dim]
        return (start, start + (out[1] - out[0] - 1) * self.stride[dim] + self.reach(dim))

    def touched(self, dim: int, inputs: Range, out: Range) -> Range:
        """Those of the outputs ``out`` whose windows span an index of ``inputs``."""
        # Output o spans o * stride - padding and reach - 1 indices behind it; -(-a // b) rounds up.
        first = -((self.reach(dim) - 1 - self.padding[dim] - inputs[0]) // self.stride[dim])
        last = (inputs[1] - 1 + self.padding[dim]) // self.stride[dim]
        start = max(out[0], first)
        return (start, max(start, min(out[1], last + 1)))


class Piece(NamedTuple):
    """Values (N, C, ...) of the input on ``box``: a range of channels, then one per spatial dimension."""

    values: torch.Tensor
    box: tuple[Range, ...]


class _Fit(NamedTuple):
    """How a piece meets a range of outputs: zeros to add (or rows to drop) around it, and torch's own padding."""

    around: list[int] | None
    padding: list[int]

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """The piece as torch convolves it; a copy only where there is something to add or drop."""
        return values if self.around is None else F.pad(values, self.around)


def _fit(box: Sequence[Range], out: Sequence[Range], geometry: Geometry) -> _Fit:
    around: list[int] = []
    padding: list[int] = []
    for dim, ((a, b), (o0, o1)) in enumerate(zip(box, out, strict=True)):
        start, stop = geometry.needed(dim, (o0, o1))
        low, high = a - start, stop - b
        outputs = (b - a + 2 * low - geometry.reach(dim)) // geometry.stride[dim] + 1
        if low >= 0 and outputs == o1 - o0:
            # Padding alike on both sides yields just these outputs: no copy.
            padding.append(low)
            around[:0] = [0, 0]
        else:
            # F.pad takes the last dimension first, and drops rows where a number is negative.
            padding.append(0)
            around[:0] = [low, high]
    return _Fit(around if any(around) else None, padding)


def is_below_overlap_threshold(x: Sequence[int], weight: Sequence[int], *, on_gpu: bool) -> bool:
    """Whether convolving a block ``x`` (N, C, ...) with stride 1 by ``weight`` (F, C / groups, ...) is little work."""
    return math.prod(x) // max(1, x[1]) * math.prod(weight) <= (LITTLE_ON_GPU if on_gpu else LITTLE)


def is_convolvable_without_copy(box: Sequence[Range], out: Sequence[Range], geometry: Geometry) -> bool:
    """Whether a piece on the spatial ``box`` contributes to the outputs ``out`` without being copied first."""
    return all(b > a for a, b in [*box, *out]) and _fit(box, out, geometry).around is None


def _view(x: torch.Tensor, box: Sequence[Range], part: Sequence[Range]) -> torch.Tensor:
    """Where ``x``, whose last dimensions cover ``box``, covers ``part``."""
    for dim, (whole, taken) in enumerate(zip(box, part, strict=True), x.dim() - len(box)):
        if taken != whole:
            x = x.narrow(dim, taken[0] - whole[0], taken[1] - taken[0])
    return x


@dataclass(frozen=True)
class Convolution:
    """The local work of a convolution: outputs on the spatial box ``out`` from pieces of its input.

    ``channels`` are those of the input that the weight (F, C / groups, ...) has entries for. With several groups a
    piece has all of them.
    """

    geometry: Geometry
    groups: int
    out: tuple[Range, ...]
    channels: Range

    def forward(self, piece: Piece, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``y`` (N, F, ...) on ``out``, as far as it comes from ``piece`` (eq. 1), and the bias."""
        touched = self._touched(piece, weight)
        if touched == self.out:
            return self._convolve(piece, touched, weight, bias)
        y = piece.values.new_zeros((piece.values.shape[0], weight.shape[0], *(b - a for a, b in self.out)))
        if bias is not None:
            y += bias.view(-1, *(1,) * len(self.out))
        return self.add(y, [piece], weight)

    def add(self, y: torch.Tensor, pieces: Sequence[Piece], weight: torch.Tensor) -> torch.Tensor:
        """Add to ``y`` what comes from further pieces."""
        for piece in pieces:
            touched = self._touched(piece, weight)
            if touched is not None:
                _view(y, self.out, touched).add_(self._convolve(piece, touched, weight, None))
        return y

    def _touched(self, piece: Piece, weight: torch.Tensor) -> tuple[Range, ...] | None:
        """Outputs that the piece contributes to, or None."""
        g = self.geometry
        touched = tuple(g.touched(d, box, o) for d, (box, o) in enumerate(zip(piece.box[1:], self.out, strict=True)))
        return touched if piece.values.numel() and weight.numel() and volume(touched) else None

    def _of(self, weight: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The part of ``weight`` that meets the channels of ``piece``."""
        first, last = (channel - self.channels[0] for channel in piece.box[0])
        return weight if piece.box[0] == self.channels else weight[:, first:last]

    def _convolve(
        self, piece: Piece, touched: Sequence[Range], weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        fit, g = _fit(piece.box[1:], touched, self.geometry), self.geometry
        convolve = CONVOLUTIONS[len(g.kernel)]
        y: torch.Tensor = convolve(
            fit.pad(piece.values), self._of(weight, piece), bias, g.stride, fit.padding, g.dilation, self.groups
        )
        return y

    def input_gradient(self, grad: torch.Tensor, piece: Piece, weight: torch.Tensor) -> torch.Tensor:
        """dL/dx on the box of ``piece`` from dL/dy on ``out`` (eq. 3)."""
        touched = self._touched(piece, weight)
        if touched is None:
            return torch.zeros_like(piece.values)
        fit = _fit(piece.box[1:], touched, self.geometry)
        part = self._of(weight, piece)
        dx = self._backward(_view(grad, self.out, touched), piece, fit, part, (True, False, False))[0]
        # Zeros that were added are cut off, rows that were dropped get zeros: nothing of these outputs came from them.
        return dx if fit.around is None else F.pad(dx, [-n for n in fit.around])

    def parameter_gradients(
        self, grad: torch.Tensor, pieces: Sequence[Piece], weight: torch.Tensor, *, bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's shares of dL/dw (eq. 2) and, if asked for, of dL/db."""
        dw: torch.Tensor | None = None
        db: torch.Tensor | None = None
        for piece in pieces:
            touched = self._touched(piece, weight)
            if touched is None:
                continue
            # torch sums dL/dy for the bias on the way, if it sees all of it.
            sees_all = bias and db is None and touched == self.out
            fit, part = _fit(piece.box[1:], touched, self.geometry), self._of(weight, piece)
            wanted = (False, True, sees_all)
            _, share, sums = self._backward(_view(grad, self.out, touched), piece, fit, part, wanted)
            if dw is None and part is weight:
                # The first piece has all channels: its share needs no zeros to be added to.
                dw = share
            else:
                dw = torch.zeros_like(weight) if dw is None else dw
                self._of(dw, piece).add_(share)
            db = sums if sees_all else db
        if bias and db is None:
            db = grad.sum([d for d in range(grad.dim()) if d != 1])
        return torch.zeros_like(weight) if dw is None else dw, db

    def gradients(
        self, grad: torch.Tensor, piece: Piece, weight: torch.Tensor, wanted: tuple[bool, bool, bool]
    ) -> tuple[torch.Tensor | None, ...]:
        """dL/dx on the box of ``piece``, and shares of dL/dw and dL/db, of a piece that is all of the needed input."""
        if not volume(self.out) or not piece.values.numel() or not weight.numel():
            sums = grad.sum([d for d in range(grad.dim()) if d != 1])
            gradients = torch.zeros_like(piece.values), torch.zeros_like(weight), sums
        else:
            gradients = self._backward(grad, piece, _fit(piece.box[1:], self.out, self.geometry), weight, wanted)
        return tuple(value if needed else None for value, needed in zip(gradients, wanted, strict=True))

    def _backward(
        self, grad: torch.Tensor, piece: Piece, fit: _Fit, weight: torch.Tensor, wanted: tuple[bool, bool, bool]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        g, x, rest = self.geometry, fit.pad(piece.values), [0] * len(fit.padding)
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten.convolution_backward(
            grad, x, weight, [weight.shape[0]], g.stride, fit.padding, g.dilation, False, rest, self.groups, wanted
        )
        return gradients


def assemble_input(pieces: Sequence[Piece], box: tuple[Range, ...]) -> Piece:
    """One piece that covers ``box``, made of those that do so together; zeros where none of them is (padding)."""
    values = pieces[0].values
    whole = values.new_zeros((values.shape[0], *(b - a for a, b in box)))
    for piece in pieces:
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, piece.box, strict=True)]
        if all(b > a for a, b in common):
            _view(whole, box, common).copy_(_view(piece.values, piece.box, common))
    return Piece(whole, box)


def crop(whole: Piece, box: tuple[Range, ...]) -> torch.Tensor:
    """Values of ``whole`` on ``box``; zeros outside it. The adjoint of :func:`merged` for one of its pieces."""
    if all(a <= c and d <= b for (a, b), (c, d) in zip(whole.box, box, strict=True)):
        return _view(whole.values, whole.box, box)
    return assemble_input([whole], box).values


def volume(box: Sequence[Range]) -> int:
    """Number of indices in ``box``."""
    return math.prod(max(0, b - a) for a, b in box)
