"""Dryden et al. 2019: strong scaling on Lassen, predicted and published.

::

    calibration  Constants of a machine, fitted to measured step times; and Amdahl's law
    command      ``distconv reproduce dryden``
    layers       Speed-ups of single convolutions that the paper prints (VI-A), and what the model predicts for them
    page         The page of :mod:`distconv.jobs.papers.dryden.predictions` in Markdown: constants, tables, errors
    predictions  The paper's strong-scaling tables as the performance model predicts them
    published    Mini-batch times that Dryden et al. 2019 measured on Lassen
"""
