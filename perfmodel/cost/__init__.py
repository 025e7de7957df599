"""What a training step costs under a plan: time of each operation, and memory.

::

    assumptions         What a prediction assumes about training, beyond the network and the machine
    block_geometry      Where blocks lie: local extents, halos
    candidates          Which distribution a plan gives each deciding layer, and which ones it could
    convolution_pieces  What a convolution really computes from on a rank
    cost_tables         A strategy's cost as tables: what the planner evaluates and what the search minimises
    evaluation          ``evaluate``: time and memory of a training step under a plan
    operation_cost      What one operation costs under one distribution
    operation_work      What one rank computes in one operation
    process_memory      What a process on a CPU has resident at most, beyond the tensors of a training step
    step_memory         Memory of a training step on the fullest rank, as terms of a strategy's problem
"""
