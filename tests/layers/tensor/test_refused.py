"""What stays refused, with its reason."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, normal, raises_everywhere

CALLS = {
    "memory": (torch.Tensor.data_ptr, "use .local"),
    "storage": (torch.Tensor.untyped_storage, "use .local"),
    "dlpack": (lambda x: x.__dlpack__(), "use .local"),
    "sharing": (torch.Tensor.share_memory_, "use .local"),
    "set_": (lambda x: x.set_(torch.zeros(3, dtype=torch.float64)), "cannot become"),
    "strides": (lambda x: x.as_strided_((2,), (1,)), "use reshape"),
    "shape": (lambda x: x.resize_(2, 2), "use a new one"),
    "array": (np.asarray, "use gather"),
    "numpy": (lambda x: x.numpy(), "use gather"),
}


@pytest.mark.usefixtures("fallback")
@pytest.mark.parametrize("name", CALLS)
def test_what_reaches_below_values_stays_refused(comm, name):
    x = dc.scatter(normal(3, 4, 4), grid_over(comm, w=comm.size))
    call, way_out = CALLS[name]
    raises_everywhere(comm, dc.UnsupportedOperation, way_out, lambda: call(x))
