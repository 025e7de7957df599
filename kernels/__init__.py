"""Part of the ``distconv`` package; import it as ``distconv.kernels``.

::

    convolution    Convolution of a piece of the input: what one rank computes by itself
    jacobian       Transposed Jacobians of layers, made analytically
    normalization  What the normalizations share
    packing        Packing on a GPU: boxes of strided tensors to and from one buffer, all by one kernel
    recurrence     The backward pass of a recurrence, step after step, compiled where numba is installed
    scan           Backpropagation as a scan: many products at a time instead of one after another
    sparse         What one rank computes on sparse tensors: sites with integer coordinates, and features of them
"""

if __name__ != "distconv.kernels":
    raise ImportError(
        "import this package as distconv.kernels: under the bare name 'kernels' its classes would exist twice"
    )
