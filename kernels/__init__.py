"""Part of the ``distconv`` package; import it as ``distconv.kernels``.

::

    convolution    Convolution of a piece of the input: what one rank computes by itself
    normalization  What the normalizations share
    sparse         What one rank computes on sparse tensors: sites with integer coordinates, and features of them
"""

if __name__ != "distconv.kernels":
    raise ImportError(
        "import this package as distconv.kernels: under the bare name 'kernels' its classes would exist twice"
    )
