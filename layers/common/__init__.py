"""Parts that operators share: distributions of operands and results, needed inputs, blocks of weights.

::

    alignment        Operands in the distribution of an operator, and shapes and errors obtained from torch
    block_edges      Edges of the blocks of a split dimension, and distributions made from edges
    call_site        Warnings that are issued once for each call site
    empty_blocks     Computation on ranks whose block is empty
    gathered_call    The fallback for functions without an operator: gather, call on every rank, split the result
    inplace_views    Views that stay consistent with their source after in-place changes, also if they are copies
    input_windows    Inputs of operators that compute each output from a window of the input
    one_rank         Calls on a grid of one rank: torch's own function computes on the block
    random_state     States of random generators: comparison between ranks, and detection of draws
    resampling       Operators whose outputs each take one input position of a dimension, or blend two
    sharded_weights  Blocks of weights and reduce-scatter of partial sums for layers whose channels are split
    value_check      Checks of values, such as indices and divisors, whose failure is raised on all ranks
"""
