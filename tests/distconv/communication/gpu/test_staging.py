"""The way of a GPU's tensors by host memory; that it is written by then is in ``test_transport.py``."""

from __future__ import annotations

import pytest
import torch

from distconv.communication.gpu.staging import Staging, copy_from_host
from tests.harness import late_gpu as late
from tests.harness.late_libraries import late_gpu


@pytest.mark.fault(54)
def test_on_the_cpu_nothing_is_staged():
    assert Staging.of([torch.zeros(3, device="cpu")], direct=False) is None


@pytest.mark.cpu
def test_what_goes_out_does_not_wait_for_what_comes_in_nor_the_other_way(monkeypatch):
    monkeypatch.setattr(late, "IDLE_S", 60.0)
    with late_gpu("late") as gpu:
        x, y = gpu.tensor(torch.ones(3)), gpu.tensor(torch.zeros(3))
        out, into = Staging(late.DEVICE, direct=False), Staging(late.DEVICE, direct=False)
        out.prepare_send(x)
        out.record_copies()
        into.deliver(y, torch.full((3,), 2.0))
        into.close()
        assert y.cpu().tolist() == [2.0] * 3
        assert not out._written.query()
        received = into.prepare_receive(y).copy_(torch.full((3,), 3.0))
        into.deliver(y, received)
        out.wait_until_written()
        assert not into._in.query()


@pytest.mark.cpu
def test_numbers_of_the_host_are_put_into_device_memory_without_a_wait():
    with late_gpu("late") as gpu:
        x, values = gpu.tensor(torch.zeros(3)), torch.ones(3)
        waits = gpu.host_waits
        copy_from_host(values, x)
        values.zero_()
        assert gpu.host_waits == waits
        assert x.cpu().tolist() == [1.0] * 3
    plain = torch.zeros(3, device="cpu")
    copy_from_host(torch.ones(3, device="cpu"), plain)
    assert plain.tolist() == [1.0] * 3
