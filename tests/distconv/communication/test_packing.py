"""Messages of boxes against slices, on the CPU; the kernel of a GPU is in ``tests/kernels/test_packing.py``."""

from __future__ import annotations

import torch

from distconv.communication.packing import Packing
from distconv.distribution import Region
from tests.distconv.layouts import counting

TOP, LEFT, CORNER = Region(0, (0, 0), (2, 5)), Region(0, (0, 0), (4, 2)), Region(1, (1, 1), (1, 1))


def test_a_box_that_is_contiguous_is_sent_and_received_where_it_lies():
    x = counting(4, 3)
    plan = Packing([[Region(0, (1, 0), (2, 3))], [Region(0, (0, 1), (4, 1))]])
    rows, column = plan.pack([x])
    assert rows.data_ptr() == x[1].data_ptr()
    assert column.tolist() == x[:, 1].tolist()
    assert plan.allocate_for_unpack([x]).messages[0].data_ptr() == x[1].data_ptr()
    assert plan.allocate_for_add(x).messages[0].data_ptr() != x[1].data_ptr()


def test_messages_hold_their_boxes_in_order_and_put_them_back():
    x, y = counting(4, 6)[:, :5], -counting(3, 3)
    plan = Packing([[TOP, CORNER], [LEFT]])
    both, left = plan.pack([x, y])
    assert both.tolist() == [*x[:2].flatten().tolist(), y[1, 1].item()]
    assert left.tolist() == x[:, :2].flatten().tolist()
    into = [torch.zeros(4, 5, dtype=x.dtype), torch.zeros(3, 3, dtype=x.dtype)]
    room = plan.allocate_for_unpack(into)
    for message, values in zip(room.messages, (both, left), strict=True):
        message.copy_(values)
    plan.unpack(room, into)
    assert torch.equal(into[0][:2], x[:2])
    assert torch.equal(into[0][:, :2], x[:, :2])
    assert not into[0][2:, 2:].any()
    assert into[1].flatten().nonzero().tolist() == [[4]]


def test_what_boxes_have_in_common_is_added_for_each():
    plan = Packing([[TOP], [LEFT]])
    total = torch.zeros(4, 5)
    room = plan.allocate_for_add(total)
    for message, value in zip(room.messages, (1.0, 10.0), strict=True):
        message.fill_(value)
    plan.add(room, [total])
    assert total[0].tolist() == [11, 11, 1, 1, 1]
    assert total[3].tolist() == [10, 10, 0, 0, 0]


def test_a_rank_that_sends_nothing_has_no_buffer():
    plan = Packing([])
    assert plan.pack([]) == []
    assert plan.allocate_for_unpack([]).buffer is None
