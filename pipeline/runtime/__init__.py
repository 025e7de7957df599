"""Pipelines over MPI ranks: who runs what, and the messages between stages.

::

    device_kinds     Kinds of devices in one job, and the ranks in the order in which a plan wants them
    executor         One rank of a pipeline: it does the actions of its list, one after the other
    message_header   What stands at the head of a message between stages
    p2p              Messages between the ranks of neighbouring stages
    pipeline         Pipelined training over MPI ranks: every rank executes its list of a schedule's actions
    pipeline_plan    Pipeline plans: where a model is cut, which ranks run each stage and how, and by which schedule
    placement        Which ranks run which stage
    replicas         What the replicas of a stage do together
    schedule_source  What a pipeline follows: a schedule for each number of micro-batches, or one without an end
    topology         Where a rank sits in a pipeline, and the communicators that go with it
"""
