"""What operators share: layouts of operands and results, needed inputs, blocks of weights.

::

    alignment        Bring operands to one layout, and ask torch itself what shape a result has
    block_edges      Where the blocks of a split dimension begin and end, and layouts made from that
    call_site        Warnings that come once for each call site
    empty_blocks     What a rank without elements computes: the same on a few zeros, of which it keeps nothing
    gathered_call    The exact fallback: a call without a distributed rule gets whole tensors
    inplace_views    Results that are views in torch but had to be gathered here
    input_windows    Operators that compute each output from a window of the input
    one_rank         Where a grid has one rank the block is the whole: torch's own operator computes there
    random_state     Generators of random numbers: whether ranks' stand alike, whether a call has drawn
    resampling       Dimensions of which each output picks one input position, or blends two
    sharded_weights  What operators with weights do where channels are split
    value_check      Checks of values, such as indices and divisors: all ranks learn of one that fails
"""
