"""Part of the ``distconv`` package; import it as ``distconv.kernels``."""

if __name__ != "distconv.kernels":
    raise ImportError(
        "import this package as distconv.kernels: under the bare name 'kernels' its classes would exist twice"
    )
