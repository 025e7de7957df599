"""Training of a model as a pipeline over ranks.

::

    options   Command-line options of pipelines, and their conversion for a number of ranks
    stages    Split points of a model at which stages take about equally long
    training  The trainer of pipelines
"""
