"""Recurrent layers whose backward pass is a parallel scan, or a compiled sweep, also over ranks that share the time.

>>> import torch
>>> gru = ScanGRU(8, 20, batch_first=True)
>>> gru.load_state_dict(torch.nn.GRU(8, 20, batch_first=True).state_dict())
<All keys matched successfully>
>>> y, last = gru(torch.ones(4, 1000, 8))
>>> y.shape
torch.Size([4, 1000, 20])

::

    backward    The backward pass of one layer on one rank, a block of steps at a time
    cells       The cells: their step by torch itself, and the derivatives of many steps at once
    methods     How a layer goes back through time, and which way is the fastest
    modules     ScanRNN and ScanGRU
    recurrence  One layer in one direction, on one rank or on ranks that share its steps
    stack       Layers upon layers, in one or two directions, of tensors, packed sequences and DistTensors
    time_ranks  Ranks that share the steps of a sequence: what each hands to the next
"""

from .methods import Method
from .modules import ScanGRU, ScanRNN

__all__ = ["Method", "ScanGRU", "ScanRNN"]
