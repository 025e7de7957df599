"""Cost of a training step under a plan: time of each operation, and memory.

::

    assumptions         Assumptions of a prediction about training, beyond the network and the machine
    block_geometry      Local shapes, halos, groups of ranks and redistributions, for process grids that need no MPI
    candidates          Candidate distributions of each deciding layer, and the distribution that a plan gives it
    convolution_pieces  Owned and received ranges of a convolution's input on a rank
    cost_tables         Cost of a strategy as tables, which the planner evaluates and the search minimizes
    evaluation          ``evaluate``: time and memory of a training step under a plan
    operation_cost      Time of one operation under one distribution, and of redistributions
    operation_work      Work of one rank in one operation: local shapes, FLOPs and bytes
    process_memory      Resident memory of a process on a CPU, beyond the tensors of a training step
    step_memory         Memory of a training step on the rank with the most, as terms of a strategy's problem
"""
