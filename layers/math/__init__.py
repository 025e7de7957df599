"""Distributed rules for arithmetic: element by element, over dimensions, and products.

::

    complex       Complex numbers: their parts, and what makes them of these
    contractions  Contractions by the names and arguments under which opt_einsum looks for them
    counting      How often values occur: each rank counts in its block, and the counts are added up
    extremes      Largest and smallest elements and where they are, with torch's conventions for ties
    fourier       Fourier transforms: one dimension after another is made whole
    linear_algebra  Functions of matrices in a batch: each rank computes those of its part of the batch
    matmul        Matrix products and their like
    norms         Norms and similarities along dimensions, split ones included
    pointwise     Elementwise operators: they act on the blocks as they are once the operands are aligned
    reductions    Sums, means, products and truth values over dimensions, split ones included
    softmax       Soft maxima along dimensions, split ones included
    sorting       Operators that see a whole dimension in its order
    variance      Variances and standard deviations, by deviations from the mean, so that a large mean costs no digits
"""
