"""Partition of a network into pipeline stages, and the cost of stages.

::

    bapipe           BaPipe's balanced partition: one accelerator per stage, in a daisy chain
    closed_forms     Time of a mini-batch and micro-batches in flight of BaPipe's schedules, in closed form
    devices          Kinds of devices that stages are placed on, and checks of them
    dynamic_program  Dynamic programming over (layers placed, devices used)
    memory           Memory of stages on their devices, and the error if no partition fits
    partition        Partition of a network into pipeline stages, each on one or more devices that hold replicas
    stage_costs      Cost of a stage: the models of PipeDream, SparsePipe and BaPipe
    stale_memory     Memory of pipelined training with stale weights
"""
