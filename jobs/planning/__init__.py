"""What the commands that plan share.

::

    chosen_pipeline      From what an exploration found to what runs: its pipeline plan and simulated timeline
    exploration_picture  The picture of an exploration: what was looked at, and when the passes of the choice run
    halo_picture         The largest halo of a plan as a diagram
    measured_steps       Training steps on random samples, timed: what predictions are compared with
    mixed_devices        Stages over several kinds of devices: profiles, SparsePipe's partition, the plan that runs
    options              What the commands that plan have in common
    package_memory       What the packages of a user's own model take, weighed while it is built
    picture              Pictures of plans: which layer is split how, where its time goes
    pipeline_overheads   What a pipelined step takes beside its layers and links, measured
    report               What ``distconv plan`` prints besides the strategy's own reasons
    single_layers        Single convolutions of the paper, and what the performance model says of them
    strong_scaling       Predicted step times over numbers of ranks
"""
