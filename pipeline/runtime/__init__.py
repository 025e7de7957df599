"""Pipelines over MPI ranks: placement of stages, execution of schedules, messages between stages.

::

    device_kinds     Kinds of devices in one job, and the ranks in the order that a plan requires
    executor         Execution of one rank's list of actions
    message_header   Header of a message between stages
    p2p              Messages between the ranks of neighbouring stages
    pipeline         ``Pipeline``: pipelined training, in which every rank executes its list of a schedule's actions
    pipeline_plan    Pipeline plans: split points, ranks and distributions of each stage, and the schedule
    placement        Placement: which ranks run which stage
    predictions      Outputs of a model, and gradients of its input, from the ranks of one stage to all ranks
    replicas         Gradient sums and exchange of records between the replicas of a stage
    schedule_source  Source of a pipeline's actions: a schedule per number of micro-batches, or a steady stream
    shared_weights   Parameters that several stages use
    topology         Position of a rank in a pipeline, and its communicators
"""
