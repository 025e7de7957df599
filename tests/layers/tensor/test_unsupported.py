"""Unsupported functions raise an error with the reason."""

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
    "shape": (lambda x: x.resize_(2, 2), "create a new one"),
}


@pytest.mark.usefixtures("fallback")
@pytest.mark.parametrize("name", CALLS)
def test_functions_that_access_memory_raise(comm, name):
    x = dc.scatter(normal(3, 4, 4), grid_over(comm, w=comm.size))
    call, way_out = CALLS[name]
    raises_everywhere(comm, dc.UnsupportedOperation, way_out, lambda: call(x))


class Named(torch.Tensor):
    """A subclass whose methods see the full tensor."""

    def largest(self) -> float:
        return float(self.detach().max())


@pytest.mark.usefixtures("fallback")
def test_an_instance_of_another_class_is_full_and_differentiable(comm):
    x = dc.scatter(normal(3, 4, 5), grid_over(comm, w=comm.size)).requires_grad_()
    if comm.size > 1:
        with pytest.warns(
            dc.ReplicationWarning, match=r"as_subclass\(Named\) of a DistTensor.* Every rank gathers 480"
        ):
            named = x.as_subclass(Named)
    else:
        named = x.as_subclass(Named)
    assert type(named) is Named and named.largest() == float(normal(3, 4, 5).max())
    (named * normal(3, 4, 5, seed=1)).sum().backward()
    assert torch.equal(dc.gather(x.grad), normal(3, 4, 5, seed=1))


@pytest.mark.ranks(2)
def test_an_instance_of_another_class_is_rejected_without_the_fallback(comm):
    x = dc.scatter(normal(3, 4), grid_over(comm, w=2))
    raises_everywhere(comm, dc.UnsupportedOperation, "whose result is the full tensor", lambda: x.as_subclass(Named))


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("fallback")
@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning", "ignore:__array_wrap__")
@pytest.mark.parametrize("call", [np.asarray, torch.Tensor.numpy])
def test_an_array_of_a_split_tensor_is_full_and_cannot_be_written_to(comm, call):
    x = dc.scatter(normal(3, 4, 5), grid_over(comm, w=comm.size))
    with pytest.warns(dc.ReplicationWarning, match="of a split DistTensor has no distributed rule: compute"):
        array = call(x)
    assert np.array_equal(array, normal(3, 4, 5).numpy())
    assert not array.flags.writeable
    assert isinstance(np.negative(x), dc.DistTensor)


@pytest.mark.ranks(2)
def test_the_source_of_a_view_is_returned_if_it_is_known(comm):
    x = dc.scatter(normal(3, 4, 5), grid_over(comm, w=comm.size))
    assert x._base is None
    assert x[..., 1]._base is x
    y = x[1:]
    raises_everywhere(comm, dc.UnsupportedOperation, "either of them may be the view", lambda: y._base)
