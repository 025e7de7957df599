"""Parameters on a process grid: sharding, comparison of replicas, optimizer state, and weight files.

::

    channel_split           Which rank has which channels and filters of a layer. Pure arithmetic
    distributed_checkpoint  torch's distributed checkpoints, written and read by a single process
    gathered_layers         Hooks by which layers see gathered weights during their forward pass
    initialization          Layers on the device ``meta``: memory and values for one layer at a time
    optimizer_state         Optimizer state sharded over ranks that hold the same parameters (ZeRO, stage 1)
    replicas                Comparison of parameters and buffers that several ranks hold
    sharded_axes            Axes over which weights are sharded. Pure arithmetic, which the planner uses, too
    sharding                Sharded parameters: each rank holds the block of a weight that it works with
    state_tensor            Entries of state dicts for sharded parameters: full tensors, linked to the blocks
    weight_files            Weight files of PyTorch and safetensors, and distributed checkpoints
    weight_groups           Weights sharded over any axes, gathered when a layer needs them (ZeRO, stage 3)
"""
