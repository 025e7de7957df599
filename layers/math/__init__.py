"""Operators for arithmetic: element by element, over dimensions, and products.

::

    complex         Complex numbers: their parts, and construction from parts
    contractions    Contractions under the names that opt_einsum looks up
    counting        Counts and look-ups of values
    extremes        Maxima and minima with their indices, and torch's conventions for ties
    fourier         Fourier transforms along split dimensions
    linear_algebra  Functions of matrices or signals in a batch that is split over ranks
    matmul          Matrix products and other contractions
    norms           Norms and similarities along dimensions, also split ones
    pointwise       Elementwise operators
    reductions      Sums, means, products and truth values over dimensions, also split ones
    softmax         Softmax and logsumexp along dimensions, also split ones
    sorting         Sorting, ranking and running sums, which need complete lines of a dimension
    variance        Variances and standard deviations, computed from deviations from the mean
"""
