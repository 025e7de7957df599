"""Accuracy of pipelined training with stale weights.

::

    command   Trains a network with stale weights and without a pipeline, from several seeds
    picture   The picture of a staleness experiment
    recipes   How the staleness experiment trains each network, and in which variants
    table     The results of a staleness experiment: a file of finished runs, and the table that sums them up
    training  One run of the staleness experiment: a network trained in one variant from one seed, in one process
"""
