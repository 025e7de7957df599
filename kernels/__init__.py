"""Part of the ``distconv`` package; import it as ``distconv.kernels``.

::

    convolution    Convolution of pieces of the input: the local computation of one rank
    jacobian       Transposed Jacobians of layers in closed form
    normalization  Common parts of the normalizations: moments and gradients
    packing        Packing on a GPU: one kernel copies boxes of strided tensors to and from a buffer
    recurrence     Sequential backward pass of a recurrence, compiled if numba is installed
    scan           Backpropagation as a parallel scan
    sparse         Local computation on sparse tensors: sites with integer coordinates, and their features
"""

if __name__ != "distconv.kernels":
    raise ImportError(
        "import this package as distconv.kernels: under the bare name 'kernels' its classes would exist twice"
    )
