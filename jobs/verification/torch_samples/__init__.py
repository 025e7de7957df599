"""torch's own samples of its operators and modules, over ranks against one process.

``database.py`` (the samples) -> ``attempt.py`` (one sample in one world) -> ``runner.py`` (all, on all splits) ->
``command.py`` (jobs, one after the other, past what hangs).

::

    attempt   One sample in one process or over ranks: its results, and its gradients
    command   ``distconv verify conformance --family torch-samples``: every sample of torch, past those that hang
    database  torch's samples: every operator and module that its own tests know, with their variants
    dtensor   The same samples through torch's DTensor, for comparison
    page      The page ``docs/evidence/torch-samples.md``: what came of them, beside DTensor, and all that is refused
    runner    Runs samples over the ranks of a job on every split, and says what came of each
"""
