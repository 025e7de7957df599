"""Part of the ``distconv`` package; import it as ``distconv.jobs``."""

if __name__ != "distconv.jobs":
    raise ImportError("import this package as distconv.jobs: under the bare name 'jobs' its classes would exist twice")
