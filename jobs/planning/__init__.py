"""Parts shared by the commands that plan.

::

    chosen_pipeline      Pipeline plan and simulated timeline of the choice of an exploration
    exploration_picture  The figure of an exploration: candidates, memory, and the timeline of the choice
    halo_picture         The largest halo of a plan as a diagram
    measured_steps       Timed training steps on random samples, with which predictions are compared
    mixed_devices        Stages over several device types: profiles, SparsePipe's partition, and the pipeline plan
    options              Options and helpers of the commands that plan
    package_memory       Memory of the packages that a user's model imports
    picture              Figures of plans: splits and times of layers, strong scaling
    pipeline_overheads   Measured overheads of a pipelined step in addition to layers and links
    report               Printed report of ``distconv plan``, without the strategy's explanation
    single_layers        Single convolutions of the paper, and their predicted times
    strong_scaling       Predicted step times over numbers of ranks
"""
