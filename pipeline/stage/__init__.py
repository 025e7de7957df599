"""One rank's stage: passes, weight versions, statistics, random numbers.

::

    buffers             Buffers of modules that a forward pass changes, such as running statistics
    passes              Forward and backward passes of one rank
    resharding          Boundary tensors: from the grid of one stage to that of the next
    rng                 Random numbers that depend on the work alone, not on the schedule or the rank
    running_statistics  Running statistics of batch norm over micro-batches and replicas
    split_backward      Backward passes in two halves: gradients of the inputs, then of the weights
    stage_inputs        Inputs of a stage, where its own graph begins
    stage_state         Parameters and buffers of all stages: checks and copies between ranks
    structures          Nested inputs and outputs of stages: their tensors, and the structure around these
    weight_versions     Versions of a stage's weights on one rank, and passes that run with one of them
"""
