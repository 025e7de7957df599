"""Common parts of the normalizations: accurate moments, and the gradient in two halves around an all-reduce.

Batch and group normalization of :mod:`distconv.layers.nn` call this module for local blocks, and sum over ranks
themselves. The module contains no communication.
"""

from __future__ import annotations

from collections.abc import Callable

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


def normalization_gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    moments: Moments,
    eps: float,
    *,
    inverse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of a normalization by given moments.

    Parameters
    ----------
    grad : Tensor
        dL/dy (N, C, ...).
    x : Tensor
        Shape (N, C, ...), not empty.
    weight : Tensor, optional
        Shape (C,).
    moments : tuple of Tensor
        Mean and biased variance, which are constants here.
    eps : float
        Added to the variance.
    inverse : Tensor, optional
        1 / sqrt(var + eps), if it is known.

    Returns
    -------
    tuple of Tensor
        dL/dx, and (2, C) with dL/dweight and dL/dbias.
    """
    mean, var = moments
    # The GPU's kernel takes the moments from one pair of arguments or the other, depending on the memory format.
    grad, x = copy_if_misread(grad), copy_if_misread(x)
    inverse = inverse_deviation(var, eps) if inverse is None else inverse
    # False: the moments are constants here. What depends on them through x is added after the all-reduce.
    dx, dw, db = torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, mean, var, mean, inverse, False, eps, [True, True, True]
    )
    return dx, torch.stack([dw, db])


def inverse_deviation(var: torch.Tensor, eps: float) -> torch.Tensor:
    """Return 1 / sqrt(var + eps).

    Parameters
    ----------
    var : Tensor
        The variance (C,).
    eps : float
        Added to the variance.

    Returns
    -------
    Tensor
        Shape (C,).
    """
    return (var + eps).rsqrt_()


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
        As in :func:`normalization_gradients`; x may be empty.
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
        self._x, self._weight, self._inverse = x, weight, inverse_deviation(var, eps)
        grad = self._partial = copy_if_misread(grad)
        # A rank without values takes part in the all-reduce of the sums.
        if not x.numel():
            self.sums = self._mean.new_zeros((2, self._mean.numel()))
        elif x.is_cuda:
            # One pass for the sums and one for the rest: the kernels of torch's own SyncBatchNorm.
            like = torch.ones_like(self._mean) if weight is None else weight  # of which only the dtype counts
            *_, dw, db = torch.batch_norm_backward_reduce(grad, x, self._mean, self._inverse, like, True, True, True)
            self.sums = torch.stack([dw, db])
        else:
            self._partial, self.sums = normalization_gradients(
                grad, x, weight, (self._mean, var), eps, inverse=self._inverse
            )

    def input_gradient(self, count: int) -> torch.Tensor:
        """Return dL/dx, given ``sums`` over all blocks. Call it once, since it overwrites its operands.

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
        slope, level = self.sums / count
        if self._x.is_cuda:
            # The kernel divides by a count, and the sums are divided already.
            one = torch.ones(1, dtype=torch.int32, device=self._x.device)
            dx: torch.Tensor = torch.batch_norm_backward_elemt(
                self._partial, self._x, self._mean, self._inverse, self._weight, level, slope / self._inverse, one
            )
            return dx
        factor = self._inverse if self._weight is None else self._inverse * self._weight
        shape = (1, -1) + (1,) * (self._x.dim() - 2)
        line = (self._mean, slope.mul_(factor * self._inverse), level.mul_(factor))
        subtract_line(self._partial, self._x, *(t.to(self._x.dtype).view(shape) for t in line))
        return self._partial.to(self._dtype)


def subtract_line(
    dx: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, slope: torch.Tensor, level: torch.Tensor
) -> None:
    """Compute ``dx -= slope * (x - mean) + level`` in place.

    On the CPU a few channels at a time, since a full x - mean would need the memory of one more activation.

    Parameters
    ----------
    dx, x : Tensor
        Shape (N, C, ...).
    mean, slope, level : Tensor
        Shape (1, C, 1, ...).
    """
    order = memory_format(dx)
    if order is not torch.contiguous_format and all(t.is_contiguous(memory_format=order) for t in (dx, x)):
        # Views of shape (positions, C). With the channels last in memory, a few positions at a time.
        dx, x = (t.movedim(1, -1).flatten(0, -2) for t in (dx, x))
        mean, slope, level = (t.flatten() for t in (mean, slope, level))
        step = dx.shape[0] if x.is_cuda else max(1, _BLOCK_ELEMENTS // dx.shape[1])
        for part, values in zip(dx.split(step), x.split(step), strict=True):
            part.addcmul_(values - mean, slope, value=-1).sub_(level)
        return
    blocks = 1 if x.is_cuda else -(-x.numel() // _BLOCK_ELEMENTS)
    if blocks <= 1:
        dx.addcmul_(x - mean, slope, value=-1).sub_(level)
        return
    # A few channels at a time: their temporary tensor stays in the cache.
    step = max(1, x.shape[1] // blocks)
    for c in (slice(i, i + step) for i in range(0, x.shape[1], step)):
        dx[:, c].addcmul_(x[:, c] - mean[:, c], slope[:, c], value=-1).sub_(level[:, c])
