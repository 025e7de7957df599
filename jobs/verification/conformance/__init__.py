"""Conformance: every operator and option on every kind of grid against one process.

``table.py`` (cases as data) and ``samples.py`` (torch's samples) -> ``families/`` (the table) -> ``command.py`` (the
engine runs them) -> ``page.py`` and ``samples_page.py`` (results).

::

    command       ``distconv verify conformance``: every operator and option on every kind of grid against one process
    dtensor       torch's samples through torch's DTensor, for comparison
    families      The conformance table, one module per family: what torch's own samples do not vary
    page          The page ``docs/evidence/conformance.md``: lines of runs on several rank counts as tables
    samples       torch's samples: every operator and module that its own tests cover, in all spellings and variants
    samples_page  The page ``docs/evidence/torch-samples.md``: results of torch's samples and DTensor's
    table         Cases of the conformance table: an operator with its options, and its inputs with letters as sizes
"""
