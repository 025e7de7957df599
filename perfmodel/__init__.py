"""Part of the ``distconv`` package; import it as ``distconv.perfmodel``."""

if __name__ != "distconv.perfmodel":
    raise ImportError(
        "import this package as distconv.perfmodel: under the bare name 'perfmodel' its classes would exist twice"
    )
