"""Training of a model as a pipeline over ranks.

::

    options   Command-line options of training as a pipeline, and what they come to for a number of ranks
    stages    Where a model is cut into the stages of a pipeline
    training  Training of a model as a pipeline over ranks, with the settings
"""
