"""Reproductions of published tables: ``distconv reproduce``, a folder for each paper.

::

    bapipe          BaPipe's evaluation: throughput, largest model, FPGA boards
    bppsa           BPPSA: sparsity of Jacobians, FLOP of a scan over a pruned network, training by scan
    dryden          Dryden et al. 2019: strong scaling on Lassen, predicted and published
    printed_tables  Common parts of the commands that print a paper's tables: on rank 0 alone, and ``--json``
    sparsepipe      SparsePipe's partitions over mixed GPUs, and the accuracy of its networks
    stale_weights   Accuracy of pipelined training with stale weights

Each package has a README.md with the results and the differences from the paper. ``distconv.cli`` uses ``EXAMPLES``,
``add_arguments`` and ``run`` of its module ``command``, and of ``sparsepipe.accuracy``. Published numbers are constants
as the paper prints them.
"""
