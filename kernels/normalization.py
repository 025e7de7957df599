"""Common parts of the normalizations: accurate moments, and the gradient in two halves around an all-reduce.

Batch and group normalization of :mod:`distconv.layers.nn` call this module for local blocks, and sum over ranks
themselves. The module contains no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from distconv.memory_format import memory_format
from distconv.precision import accumulation_dtype

_BLOCK_ELEMENTS = 1 << 19
"""Number of elements of a temporary tensor: about the size of a core's cache."""

Moments = tuple[torch.Tensor, torch.Tensor]
"""Mean and biased variance."""


def refine_moments(
    moments_about: Callable[[torch.Tensor], Moments], origin: torch.Tensor, dtype: torch.dtype
) -> Moments:
    """Return the moments of values of ``dtype`` from sums in float64.

    Parameters
    ----------
    moments_about : callable
        Returns the moments from sums of distances from a given origin. If the origin is far from the mean, the
        difference of squares loses digits: at a distance of 10^4 standard deviations the variance has 8 digits left.
    origin : Tensor
        An estimate of the mean. Sums about it suffice for dtypes of less precision than float64; for float64 they give
        the mean, about which sums are taken again.
    dtype : torch.dtype
        The dtype of the values.

    Returns
    -------
    tuple of Tensor
        Mean and biased variance, as ``moments_about`` returns them.
    """
    mean, var = moments_about(origin)
    return moments_about(mean) if dtype == torch.float64 else (mean, var)


def copy_if_misread(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor that torch's kernels read correctly: a copy if they would take its strides for channels_last.

    This happens if a size is 1 (:func:`can_be_misread`), whose stride may be anything.

    Parameters
    ----------
    t : Tensor
        Shape (N, C, ...).

    Returns
    -------
    Tensor
        ``t`` itself, or a contiguous copy.
    """
    is_misread = 1 in t.shape[2:] or (t.shape[0] == 1 and t.stride(0) != t.numel())
    return t.contiguous() if is_misread else t


def can_be_misread(shape: torch.Size) -> bool:
    """Return True if a tensor of ``shape`` (N, C, ...) may have strides for which :func:`copy_if_misread` copies."""
    return shape[0] == 1 or 1 in shape[2:]


def gradient_sums(
    grad: torch.Tensor, x: torch.Tensor, moments: Moments, inverse: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the sums over a block from which the gradients of a normalization by given moments are computed.

    Parameters
    ----------
    grad : Tensor
        dL/dy (N, C, ...).
    x : Tensor
        Shape (N, C, ...), not empty.
    moments : tuple of Tensor
        Mean and biased variance (C,).
    inverse : Tensor
        1 / sqrt(var + eps), shape (C,).
    eps : float
        Added to the variance.

    Returns
    -------
    Tensor
        Shape (2, C): this block's contributions to dL/dweight and dL/dbias.
    """
    mean, var = moments
    # Kernels take the moments from one pair of arguments or the other, by device and memory format. False: the
    # moments are constants here. What depends on them through x follows after the all-reduce.
    _, dw, db = torch.ops.aten.native_batch_norm_backward(
        copy_if_misread(grad), copy_if_misread(x), None, mean, var, mean, inverse, False, eps, [False, True, True]
    )
    return torch.stack([dw, db])


def normalize_differentiably(
    x: torch.Tensor,
    mean: Callable[[torch.Tensor], torch.Tensor],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Return (x - mean) / std * weight + bias, computed by operators that have derivatives of any order.

    Parameters
    ----------
    x : Tensor
        The input.
    mean : callable
        Returns the means of a tensor like x, over all ranks that share them, in a shape that broadcasts to it.
    weight, bias : Tensor, optional
        In shapes that broadcast to x.
    eps : float
        Added to the variance.

    Returns
    -------
    Tensor
        The shape of x.
    """
    # The deviations first: the difference of mean squares would lose digits.
    deviation = x - mean(x)
    y = deviation * (mean(deviation * deviation) + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


class BatchNormGradient:
    """Gradients of batch norm by the moments of x itself, in two halves around an all-reduce.

    1. The constructor computes ``sums`` (2, C), this block's contributions to dL/dweight and dL/dbias.
    2. The caller sums ``sums`` in place over all blocks from which the moments were computed.
    3. :meth:`input_gradient` returns dL/dx.

    Parameters
    ----------
    grad, x, weight, eps
        dL/dy, the input (N, C, ...), which may be empty, the weight (C,) or None, and the number added to the variance.
    moments : tuple of Tensor
        Mean and biased variance over all blocks, not in half precision.
    """

    def __init__(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        moments: Moments,
        eps: float,
    ) -> None:
        self._dtype, self._mean, var = x.dtype, moments[0], moments[1]
        if not x.is_cuda:
            # Rounded once, at the end: a slope of 1 / variance may be outside the range of half precision.
            grad, x = (t.to(accumulation_dtype(t.dtype)) for t in (grad, x))
            weight = None if weight is None else weight.to(var.dtype)
        self._x, self._weight, self._inverse = x, weight, (var + eps).rsqrt_()
        grad = self._grad = copy_if_misread(grad)
        # A rank without values takes part in the all-reduce of the sums.
        if not x.numel():
            self.sums = self._mean.new_zeros((2, self._mean.numel()))
        elif x.is_cuda:
            # One pass for the sums and one for the rest: the kernels of torch's own SyncBatchNorm.
            like = torch.ones_like(self._mean) if weight is None else weight  # of which only the dtype counts
            *_, dw, db = torch.batch_norm_backward_reduce(grad, x, self._mean, self._inverse, like, True, True, True)
            self.sums = torch.stack([dw, db])
        else:
            self.sums = gradient_sums(grad, x, (self._mean, var), self._inverse, eps)

    def input_gradient(self, count: int) -> torch.Tensor:
        """Return dL/dx, given ``sums`` over all blocks.

        Parameters
        ----------
        count : int
            Number of values of each channel in all blocks.

        Returns
        -------
        Tensor
            The shape and dtype of x.
        """
        if not self._x.numel():
            return torch.empty_like(self._x, dtype=self._dtype)
        # dL/dx is the gradient of the normalization by constant moments, minus a linear function of x.
        # By the number of values on all ranks.
        slope, level = (self.sums / count).unbind()
        if self._x.is_cuda:
            # The kernel divides by a count, and the sums are divided already.
            one = torch.ones(1, dtype=torch.int32, device=self._x.device)
            dx: torch.Tensor = torch.batch_norm_backward_elemt(
                self._grad, self._x, self._mean, self._inverse, self._weight, level, slope / self._inverse, one
            )
            return dx
        factor = self._inverse if self._weight is None else self._inverse * self._weight
        line = (self._mean, slope.mul_(factor * self._inverse), level.mul_(factor))
        return input_gradient(self._grad, self._x, factor, line).to(self._dtype)


def input_gradient(
    grad: torch.Tensor, x: torch.Tensor, factor: torch.Tensor, line: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return ``factor * grad - slope * (x - mean) - level``, the gradient of a normalization with respect to x.

    On a CPU a few channels or positions at a time, so that intermediate results stay in the cache.

    Parameters
    ----------
    grad, x : Tensor
        Shape (N, C, ...), of one dtype.
    factor : Tensor
        Shape (C,).
    line : tuple of Tensor
        ``mean``, ``slope`` and ``level``, each of shape (C,).

    Returns
    -------
    Tensor
        The shape, dtype and memory format of x.
    """
    dx = torch.empty_like(x)
    for out, dy, values, scale, mean, slope, level in _slices((dx, grad, x), [t.to(x.dtype) for t in (factor, *line)]):
        torch.mul(dy, scale, out=out).addcmul_(values - mean, slope, value=-1).sub_(level)
    return dx


def _slices(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], numbers: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield slices of tensors (N, C, ...) of about the size of a cache, with the ``numbers`` (C,) of their channels."""
    x = tensors[2]
    by_channel = [t.view(1, -1, *(1,) * (x.dim() - 2)) for t in numbers]
    blocks = 1 if x.is_cuda else -(-x.numel() // _BLOCK_ELEMENTS)
    if blocks <= 1:
        yield (*tensors, *by_channel)
        return
    order = memory_format(x)
    if order is not torch.contiguous_format and all(t.is_contiguous(memory_format=order) for t in tensors):
        # Views of shape (positions, C), since the channels are last in memory.
        flat = [t.movedim(1, -1).flatten(0, -2) for t in tensors]
        for parts in zip(*(t.split(max(1, _BLOCK_ELEMENTS // x.shape[1])) for t in flat), strict=True):
            yield (*parts, *numbers)
        return
    step = max(1, x.shape[1] // blocks)
    for first in range(0, x.shape[1], step):
        yield tuple(t[:, first : first + step] for t in (*tensors, *by_channel))
