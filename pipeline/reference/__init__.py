"""Pipelined training without ranks, which the runtime equals bit for bit.

::

    serial        Pipelined training without ranks
    serial_stage  One stage of pipelined training without ranks
"""
