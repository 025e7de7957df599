"""Part of the ``distconv`` package; import it as ``distconv.layers``."""

if __name__ != "distconv.layers":
    raise ImportError("import this package as distconv.layers: under the bare name 'layers' its classes would exist twice")

from distconv.layers import convolution, elementwise, reductions

__all__ = ["convolution", "elementwise", "reductions"]
