"""BaPipe's evaluation: throughput, largest model, FPGA boards.

::

    command        BaPipe's evaluation by its own closed forms
    cuts           BaPipe's split points against those searched for each schedule
    fpga           BaPipe's Table VI: ResNet-50 on FPGA boards
    largest_model  BaPipe's Table IV: the largest GNMT that fits, by system and number of GPUs
    networks       The networks of BaPipe's tables as layer profiles of a micro-batch
    schedules      BaPipe's Tables I and II: mini-batch time, memory and bandwidth of each schedule
"""
