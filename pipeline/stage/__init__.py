"""What one rank does for its stage: passes, weight versions, statistics, random numbers.

::

    buffers             Buffers of modules that a forward pass changes, such as running statistics
    passes              The forward and backward passes of one rank
    resharding          What crosses from the grid of one stage to that of the next
    rng                 Random numbers that depend on the work alone: not on the schedule, nor on which rank does it
    running_statistics  Running statistics of batch norm where passes over micro-batches must not simply update
    split_backward      A backward pass in two halves
    stage_inputs        Where a stage's own graph begins
    stage_state         Parameters and buffers of all stages
    weight_versions     The versions of one stage's weights that a rank keeps, and passes that run with one of them
"""
