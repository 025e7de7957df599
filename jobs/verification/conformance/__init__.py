"""Conformance: every operator and option on every kind of grid against one process.

``table.py`` (a case is data) and ``samples.py`` (those of torch) -> ``families/`` (the table) -> ``command.py`` (the
engine runs them) -> ``page.py`` and ``samples_page.py`` (what came of them).

::

    command       ``distconv verify conformance``: every operator and option on every kind of grid against one process
    dtensor       torch's samples through torch's DTensor, for comparison
    families      The conformance table, one module per family: what torch's own samples do not vary
    page          The page ``docs/evidence/conformance.md``: lines of runs on several rank counts as tables
    samples       torch's samples: every operator and module that its own tests know, in all spellings and variants
    samples_page  The page ``docs/evidence/torch-samples.md``: what came of torch's samples, beside DTensor
    table         Cases of the conformance table: an operator with its options, and its inputs in letters
"""
