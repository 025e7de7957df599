"""Cuts of a network into pipeline stages, and what stages cost.

::

    bapipe           BaPipe's balanced partition: one accelerator per stage, in a daisy chain
    closed_forms     How long a mini-batch takes in BaPipe's schedules, in closed form
    devices          Kinds of devices that stages are placed on, and what is refused about them
    dynamic_program  Dynamic programming over (layers placed, devices used)
    memory           Which stages fit their devices, and what to say when no partition does
    partition        Cuts a network into pipeline stages, each on one or more devices that hold replicas of it
    stage_costs      What a stage costs: the models of PipeDream, SparsePipe and BaPipe
    stale_memory     Memory of pipelined training with stale weights
"""
