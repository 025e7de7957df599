"""Convolution of pieces of the input: the local computation of one rank.

A convolution is linear. So a block of its output is the sum of the contributions of all pieces of the needed input: the
owned block, and the ghosts (halo and channels) received from other ranks. A piece is a tensor with the global box that
it covers. All geometry is computed from a range of outputs back to a range of inputs, so one rule serves any stride,
dilation, kernel and padding::

    outputs that a piece contributes to   Geometry.touched      of the box of the piece
    inputs that these outputs need        Geometry.needed       of the outputs
    zeros and rows around the piece       _fit                  needed minus box: torch's padding, or F.pad

:mod:`distconv.layers.nn.convolution` exchanges the ghosts and calls this module, which contains no communication.

Letters for local tensors: x (N, C, [D, [H,]] W), w (F, C / groups, [kD, [kH,]] kW), b (F,), y (N, F, ...).

Source: Dryden et al. 2019, II-A (eqs. 1-3), III-A and, for channels, III-D.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from distconv.memory_format import new_empty

Range = tuple[int, int]
"""Half-open range of global indices of a dimension. An :class:`~distconv.distribution.Interval` is one."""

OVERLAP_THRESHOLD = 1 << 26
"""Number of multiplications up to which messages are not overlapped with computation on a CPU.

An additional call of torch costs more than a copy of the input there. Nothing is lost by waiting first, since messages
make no progress on a CPU while torch computes.
"""

OVERLAP_THRESHOLD_ON_GPU = 1 << 20
"""As :data:`OVERLAP_THRESHOLD`, on a GPU, where messages progress during computation."""

CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
"""torch's functions by the number of spatial dimensions."""


@dataclass(frozen=True)
class Geometry:
    """Spatial geometry of a convolution or pooling, with one entry for each spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    """Before the first index. The padding after the last one follows from the number of outputs."""
    dilation: tuple[int, ...]

    def reach(self, dim: int) -> int:
        """Return the number of input indices from the first to the last of a window.

        Parameters
        ----------
        dim : int
            The spatial dimension.

        Returns
        -------
        int
        """
        return (self.kernel[dim] - 1) * self.dilation[dim] + 1

    def needed(self, dim: int, out: Range) -> Range:
        """Return the range of inputs that a range of outputs is computed from.

        Parameters
        ----------
        dim : int
            The spatial dimension.
        out : Range
            Global indices of outputs.

        Returns
        -------
        Range
            Global indices of inputs; those of the padding are negative or beyond the size. (0, 0) for no outputs.
        """
        if out[0] >= out[1]:
            return (0, 0)
        start = out[0] * self.stride[dim] - self.padding[dim]
        return (start, start + (out[1] - out[0] - 1) * self.stride[dim] + self.reach(dim))

    def touched(self, dim: int, inputs: Range, out: Range) -> Range:
        """Return the range of outputs whose windows span an index of some inputs.

        Parameters
        ----------
        dim : int
            The spatial dimension.
        inputs : Range
            Global indices of inputs, at least one.
        out : Range
            The outputs to choose from.

        Returns
        -------
        Range
            A part of ``out``, perhaps empty.
        """
        # Output o spans the index o * stride - padding and reach - 1 indices after it; -(-a // b) rounds up.
        first = -((self.reach(dim) - 1 - self.padding[dim] - inputs[0]) // self.stride[dim])
        last = (inputs[1] - 1 + self.padding[dim]) // self.stride[dim]
        start = max(out[0], first)
        return (start, max(start, min(out[1], last + 1)))


class Piece(NamedTuple):
    """Values of the input on a box."""

    values: torch.Tensor
    """Shape (N, C, ...)."""
    box: tuple[Range, ...]
    """A range of channels, then one for each spatial dimension, in global indices."""


def is_below_overlap_threshold(x: Sequence[int], weight: Sequence[int], *, on_gpu: bool) -> bool:
    """Return True if a convolution is so little work that overlapping messages with it does not pay.

    Parameters
    ----------
    x : sequence of int
        Shape of this rank's block (N, C, ...). The stride is taken to be 1.
    weight : sequence of int
        Shape (F, C / groups, ...).
    on_gpu : bool
        Use the threshold for a GPU. Otherwise that for a CPU.
    """
    # Each position of x meets each weight of its channels once.
    multiplications = math.prod(x) // max(1, x[1]) * math.prod(weight)
    return multiplications <= (OVERLAP_THRESHOLD_ON_GPU if on_gpu else OVERLAP_THRESHOLD)


def is_convolvable_without_copy(box: Sequence[Range], out: Sequence[Range], geometry: Geometry) -> bool:
    """Return True if torch can convolve a piece without a padded or cropped copy of it.

    Parameters
    ----------
    box : sequence of Range
        The spatial box of the piece.
    out : sequence of Range
        The outputs to compute.
    geometry : Geometry
        The geometry.
    """
    return all(b > a for a, b in [*box, *out]) and _fit(box, out, geometry).pad_widths is None


@dataclass(frozen=True)
class Convolution:
    """The local computation of a block of y from pieces of x."""

    geometry: Geometry
    groups: int
    out: tuple[Range, ...]
    """The spatial box of the block of y, in global indices of outputs."""
    channels: Range
    """Global indices of the input channels of the weight. With several groups each piece must have all of them."""

    def forward(self, piece: Piece, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the contribution of a piece to y, plus the bias (eq. 1).

        Parameters
        ----------
        piece : Piece
            Any part of the needed input, perhaps without elements.
        weight : Tensor
            w (F, C / groups, ...), with the channels ``channels``.
        bias : Tensor, optional
            b (F,).

        Returns
        -------
        Tensor
            y (N, F, ...) on ``out``.
        """
        touched = self._touched(piece, weight)
        # One call computes all outputs, and adds the bias. Zeros to add to are needed only for a part of them.
        if touched == self.out:
            return self._convolve(piece, touched, weight, bias)
        y = new_empty(piece.values, (piece.values.shape[0], weight.shape[0], *(b - a for a, b in self.out))).zero_()
        # To all outputs, also to those that the piece does not reach. add() passes no bias.
        if bias is not None:
            y += bias.view(-1, *(1,) * len(self.out))
        return self.add(y, [piece], weight)

    def add(self, y: torch.Tensor, pieces: Sequence[Piece], weight: torch.Tensor) -> torch.Tensor:
        """Add the contributions of further pieces to y.

        Parameters
        ----------
        y : Tensor
            Shape (N, F, ...), on ``out``; changed in place.
        pieces : sequence of Piece
            Parts of the needed input that do not overlap with those before.
        weight : Tensor
            As in :meth:`forward`.

        Returns
        -------
        Tensor
            ``y``.
        """
        for piece in pieces:
            touched = self._touched(piece, weight)
            if touched is not None:
                _view(y, self.out, touched).add_(self._convolve(piece, touched, weight, None))
        return y

    def _touched(self, piece: Piece, weight: torch.Tensor) -> tuple[Range, ...] | None:
        """Return the box of outputs that the piece contributes to, or None if there are none."""
        g = self.geometry
        touched = tuple(g.touched(d, box, o) for d, (box, o) in enumerate(zip(piece.box[1:], self.out, strict=True)))
        # torch rejects empty operands, and nothing would be added.
        return touched if piece.values.numel() and weight.numel() and volume(touched) else None

    def _weight_for(self, weight: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return the part of ``weight`` for the channels of ``piece``."""
        first, last = (channel - self.channels[0] for channel in piece.box[0])
        # The weight itself if nothing is left out: parameter_gradients compares by identity.
        return weight if piece.box[0] == self.channels else weight[:, first:last]

    def _convolve(
        self, piece: Piece, touched: Sequence[Range], weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        fit, g = _fit(piece.box[1:], touched, self.geometry), self.geometry
        convolve = CONVOLUTIONS[len(g.kernel)]
        y: torch.Tensor = convolve(
            fit.pad(piece.values), self._weight_for(weight, piece), bias, g.stride, fit.padding, g.dilation, self.groups
        )
        return y

    def input_gradient(self, grad: torch.Tensor, piece: Piece, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's contribution to dL/dx on the box of a piece (eq. 3).

        Parameters
        ----------
        grad : Tensor
            dL/dy (N, F, ...) on ``out``.
        piece : Piece
            The piece of x. Only its shape, dtype and box matter.
        weight : Tensor
            As in :meth:`forward`.

        Returns
        -------
        Tensor
            Of the shape of ``piece.values``.
        """
        touched = self._touched(piece, weight)
        if touched is None:
            return torch.zeros_like(piece.values)
        fit = _fit(piece.box[1:], touched, self.geometry)
        part = self._weight_for(weight, piece)
        dx = self._backward(_view(grad, self.out, touched), piece, fit, part, (True, False, False))[0]
        # The adjoint of pad(): added zeros are dropped, and dropped rows, which contributed nothing, get zeros.
        return dx if fit.pad_widths is None else F.pad(dx, [-n for n in fit.pad_widths])

    def parameter_gradients(
        self, grad: torch.Tensor, pieces: Sequence[Piece], weight: torch.Tensor, *, bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return this rank's contributions to dL/dw (eq. 2) and dL/db.

        Parameters
        ----------
        grad : Tensor
            dL/dy (N, F, ...) on ``out``.
        pieces : sequence of Piece
            All of the needed input.
        weight : Tensor
            As in :meth:`forward`. Only its shape and dtype matter.
        bias : bool
            Compute dL/db, too. Otherwise it is None.

        Returns
        -------
        tuple of (Tensor, Tensor or None)
            dL/dw of the shape of ``weight``, and dL/db (F,).
        """
        dw: torch.Tensor | None = None
        db: torch.Tensor | None = None
        for piece in pieces:
            touched = self._touched(piece, weight)
            if touched is None:
                continue
            # torch sums dL/dy for the bias in the same call. It is dL/db only if the piece contributes to all outputs.
            with_bias = bias and db is None and touched == self.out
            fit, part = _fit(piece.box[1:], touched, self.geometry), self._weight_for(weight, piece)
            wanted = (False, True, with_bias)
            _, dw_piece, db_piece = self._backward(_view(grad, self.out, touched), piece, fit, part, wanted)
            if dw is None and part is weight:
                # The first piece has all channels of the weight: no zeros are needed to add to.
                dw = dw_piece
            else:
                dw = torch.zeros_like(weight) if dw is None else dw
                self._weight_for(dw, piece).add_(dw_piece)
            db = db_piece if with_bias else db
        if bias and db is None:
            db = grad.sum([d for d in range(grad.dim()) if d != 1])
        return torch.zeros_like(weight) if dw is None else dw, db

    def gradients(
        self, grad: torch.Tensor, piece: Piece, weight: torch.Tensor, wanted: tuple[bool, bool, bool]
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the contributions to all gradients in one call of torch, for a piece that is all of the needed input.

        Parameters
        ----------
        grad : Tensor
            dL/dy (N, F, ...) on ``out``.
        piece : Piece
            All of the needed input, padding included.
        weight : Tensor
            As in :meth:`forward`.
        wanted : tuple of bool
            The gradients to compute: dL/dx, dL/dw, dL/db.

        Returns
        -------
        tuple of (Tensor or None)
            dL/dx on the box of ``piece``, dL/dw and dL/db; None if not ``wanted``.
        """
        # An empty block still has a gradient of the right shape: the other ranks wait for it in the all-reduce.
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
    """Copy pieces into one that covers a box, with zeros where there is no piece (padding).

    Parameters
    ----------
    pieces : sequence of Piece
        At least one. What lies outside of ``box`` is dropped.
    box : tuple of Range
        Channels, then each spatial dimension.

    Returns
    -------
    Piece
        Of the dtype and device of the first piece.
    """
    values = pieces[0].values
    assembled = new_empty(values, (values.shape[0], *(b - a for a, b in box))).zero_()
    for piece in pieces:
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, piece.box, strict=True)]
        if all(b > a for a, b in common):
            _view(assembled, box, common).copy_(_view(piece.values, piece.box, common))
    return Piece(assembled, box)


def crop(piece: Piece, box: tuple[Range, ...]) -> torch.Tensor:
    """Return the values of a piece on another box, with zeros outside of the piece.

    The adjoint of :func:`assemble_input` for one of its pieces.

    Parameters
    ----------
    piece : Piece
        The piece.
    box : tuple of Range
        Channels, then each spatial dimension.

    Returns
    -------
    Tensor
        A view if ``box`` lies within the piece. Otherwise a copy.
    """
    # A view, without a copy.
    if all(a <= c and d <= b for (a, b), (c, d) in zip(piece.box, box, strict=True)):
        return _view(piece.values, piece.box, box)
    return assemble_input([piece], box).values


def volume(box: Sequence[Range]) -> int:
    """Return the number of indices in ``box``; 0 if any range is empty."""
    return math.prod(max(0, b - a) for a, b in box)


class _Fit(NamedTuple):
    """Padding and cropping with which the convolution of a piece gives exactly a range of outputs."""

    pad_widths: list[int] | None
    """Zeros to add around the piece, as ``F.pad`` takes them; negative to drop rows. None if there are none."""
    padding: list[int]
    """torch's own padding for each dimension, which is the same on both sides and needs no copy."""

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """Return the piece as torch convolves it; a copy only if there is something to add or drop."""
        return values if self.pad_widths is None else F.pad(values, self.pad_widths)


def _fit(box: Sequence[Range], out: Sequence[Range], geometry: Geometry) -> _Fit:
    """Return the fit of a piece on the spatial ``box`` to the outputs ``out``."""
    around: list[int] = []
    padding: list[int] = []
    for dim, ((a, b), (o0, o1)) in enumerate(zip(box, out, strict=True)):
        start, stop = geometry.needed(dim, (o0, o1))
        low, high = a - start, stop - b
        # The outputs that torch gives if the padding before the piece is on both sides.
        outputs = (b - a + 2 * low - geometry.reach(dim)) // geometry.stride[dim] + 1
        if low >= 0 and outputs == o1 - o0:
            # The same padding on both sides gives exactly these outputs: no copy.
            padding.append(low)
            around[:0] = [0, 0]
        else:
            # F.pad takes the last dimension first, and drops rows if a number is negative.
            padding.append(0)
            around[:0] = [low, high]
    return _Fit(around if any(around) else None, padding)


def _view(x: torch.Tensor, box: Sequence[Range], part: Sequence[Range]) -> torch.Tensor:
    """Return the view on ``part`` of ``x``, whose last dimensions cover ``box``."""
    # Dimensions before those of the box, such as the samples, stay as they are.
    for dim, (outer, inner) in enumerate(zip(box, part, strict=True), x.dim() - len(box)):
        if inner != outer:
            x = x.narrow(dim, inner[0] - outer[0], inner[1] - inner[0])
    return x
