"""Pipelined training without ranks, whose results the runtime reproduces bit for bit.

::

    serial        ``SerialPipeline``: pipelined training without ranks
    serial_stage  One stage of pipelined training without ranks
"""
