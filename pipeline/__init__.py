"""Part of the ``distconv`` package; import it as ``distconv.pipeline``."""

if __name__ != "distconv.pipeline":
    raise ImportError(
        "import this package as distconv.pipeline: under the bare name 'pipeline' its classes would exist twice"
    )
