"""Entries say what they read and make, and by the same text that they do the same."""

from __future__ import annotations

import torch
from mpi4py import MPI

from distconv.capture.entries import Begin, Call, End, Operator, Post, Recording, Ref, SetGenerator, Sum, Wait, refs


def operator(*args, **kwargs):
    return Operator("here", torch.ops.aten.add.Tensor, args, kwargs, [9, None], False)


def test_slots_are_found_in_nested_arguments():
    assert list(refs([Ref(1), (2, [Ref(3)], {"a": Ref(4)}), 5])) == [1, 3, 4]
    entry = operator(Ref(0), [Ref(2)], alpha=Ref(1))
    assert list(entry.reads()) == [0, 2, 1]
    assert list(entry.makes()) == [9]


def test_entries_differ_where_their_texts_do():
    assert operator(Ref(0), 1.0).text() == operator(Ref(0), 1.0).text()
    assert len({operator(Ref(0), 1.0).text(), operator(Ref(1), 1.0).text(), operator(Ref(0), 1.5).text()}) == 3


def test_what_messages_read_and_which_communicators_are_used():
    world, own = MPI.COMM_WORLD, MPI.COMM_SELF
    post = Post("here", 0, world, [(1, 5)], [(1, 6)], "halo")
    total = Sum("here", 1, own, 7, MPI.SUM, "sum")
    assert list(post.reads()) == [5, 6]
    assert list(total.reads()) == [7]
    assert list(Begin("here", 3).reads()) == [3]
    assert list(Begin("here", None, world).reads()) == list(End("here").reads()) == []
    assert list(Wait("here", 0, (5, 6)).reads()) == [5, 6]
    assert list(SetGenerator("here", 4).reads()) == [4]
    call = Call("here", print, (1, 2), [3], True)
    assert (list(call.reads()), list(call.makes())) == ([1, 2], [3])
    comms = Recording(entries=[post, total, post, call]).comms()
    assert comms == [world, own]
