"""Accuracy of pipelined training with stale weights.

::

    command   Trains a network with stale weights and without a pipeline, from several seeds
    picture   Figure of a staleness experiment: learning curves, and accuracy over stale weights
    recipes   Recipes of the staleness experiment: hyperparameters and variants of each network
    table     The results of a staleness experiment: a file of finished runs, and the table that sums them up
    training  One run of the staleness experiment: a network trained in one variant from one seed, in one process
"""
