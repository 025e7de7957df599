"""Entries: the slots that they read and make."""

from __future__ import annotations

import torch
from mpi4py import MPI

from distconv.capture.entries import Call, Operator, Post, Recording, Ref, Sum, Together, Wait, makes, reads, refs


def test_slots_are_found_in_nested_arguments():
    assert list(refs([Ref(1), (2, [Ref(3)], {"a": Ref(4)}), 5])) == [1, 3, 4]
    args, kwargs = (Ref(0), [Ref(2)]), {"alpha": Ref(1)}
    entry = Operator("here", torch.ops.aten.add.Tensor, args, kwargs, [9, None], False)
    assert reads(entry) == [0, 2, 1]
    assert makes(entry) == [9]


def test_what_messages_read_and_which_communicators_are_used():
    world, own = MPI.COMM_WORLD, MPI.COMM_SELF
    post = Post("here", 0, world, [(1, 5)], [(1, 6)], "halo")
    total = Sum("here", 1, own, 7, MPI.SUM, "sum")
    assert reads(post) == [5, 6]
    assert reads(total) == [7]
    assert reads(Wait("here", 0, (5, 6))) == [5, 6]
    call = Call("here", print, (1, 2), [3], True)
    assert (reads(call), makes(call)) == ([1, 2], [3])
    both = Together("here", world, [call, total])
    assert (reads(both), makes(both)) == ([1, 2, 7], [3])
    recording = Recording(entries=[post, both, post])
    assert list(recording.all_entries()) == [post, both, call, total, post]
    assert recording.comms() == [world, own]
