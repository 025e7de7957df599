"""Recurrent layers with a backward pass by a parallel scan or a compiled sweep, also split over time.

::

    backward    The backward pass of one layer on one rank, in blocks of steps
    cells       The cells: their steps by torch, and the derivatives of many steps at once
    methods     Algorithms of the backward pass through time, and the choice of the fastest
    modules     ScanRNN and ScanGRU
    recurrence  One layer in one direction, on one rank or on ranks among which its steps are split
    stack       Stacked layers in one or two directions, for tensors, packed sequences and DistTensors
    time_ranks  Messages between ranks among which the steps of a sequence are split

Examples
--------
>>> import torch
>>> gru = ScanGRU(8, 20, batch_first=True)
>>> gru.load_state_dict(torch.nn.GRU(8, 20, batch_first=True).state_dict())
<All keys matched successfully>
>>> y, last = gru(torch.ones(4, 1000, 8))
>>> y.shape
torch.Size([4, 1000, 20])
"""

from .methods import Method
from .modules import ScanGRU, ScanRNN

__all__ = ["Method", "ScanGRU", "ScanRNN"]
