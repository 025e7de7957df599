"""Headers of messages: what is written is read again, and what has no place in one is refused."""

from __future__ import annotations

import math

import pytest
import torch

from distconv.errors import PipelineError
from distconv.pipeline.runtime import message_header
from distconv.pipeline.runtime.message_header import DTYPES, MessageHeader, TensorHeader, strides_of
from distconv.pipeline.schedules.actions import Kind, Message
from distconv.pipeline.stage.stage_inputs import Minibatch
from distconv.pipeline.stage.structures import flatten


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_header_says_again_what_was_written(dtype):
    tensors = (
        TensorHeader(dtype, (3, 4), (1, 3)),
        TensorHeader(None),
        TensorHeader(dtype),
        TensorHeader(torch.int64, (0, 2)),
    )
    for loss in (0.1, -math.inf, 1e-310):
        structure = flatten({"x": torch.ones(2), "y": [None, 1.5]}, "x").structure
        header = MessageHeader(Message(Kind.B, 7, 2), Minibatch(2**40, 2**35, True), tensors, loss, 2**33, structure)
        assert MessageHeader.decode(header.encode().tolist()) == header


def test_a_header_keeps_a_loss_that_is_no_number():
    found = MessageHeader.decode(MessageHeader(Message(Kind.F, 0, 1), Minibatch(0, 4), ()).encode().tolist())
    assert math.isnan(found.loss)


@pytest.mark.parametrize("shape", [(1,) * 4, ()], ids=str)
def test_more_tensors_than_a_header_holds_are_refused(shape):
    fits = (message_header.HEADER - 10) // (3 + len(shape))
    MessageHeader(Message(Kind.F, 0, 1), Minibatch(0, 4), (TensorHeader(torch.float32, shape),) * fits).encode()
    with pytest.raises(PipelineError, match=f"{fits + 1} tensors in a structure of 0 bytes are sent"):
        MessageHeader(
            Message(Kind.F, 0, 1), Minibatch(0, 4), (TensorHeader(torch.float32, shape),) * (fits + 1)
        ).encode()


def test_a_dtype_that_cannot_be_sent_is_named():
    with pytest.raises(PipelineError, match=r"torch\.float8_e5m2 cannot be sent"):
        MessageHeader(Message(Kind.F, 0, 1), Minibatch(0, 4), (TensorHeader(torch.float8_e5m2, (2,)),)).encode()


@pytest.mark.parametrize("strided", [False, True])
def test_a_tensor_is_described_by_what_a_receiver_must_allocate(strided):
    x = torch.zeros(2, 3, 4, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    assert TensorHeader.from_tensor(x, strided=strided) == TensorHeader(
        torch.float64, (2, 3, 4, 5), x.stride() if strided else ()
    )
    assert TensorHeader.from_tensor(None, strided=strided) == TensorHeader(None)


def test_strides_are_those_of_a_clone():
    x = torch.zeros(4, 3, 5, 2)
    for value in (x, x.transpose(0, 2), x[1:, ::2], x.to(memory_format=torch.channels_last), x[:1, 0, 0, 0]):
        assert strides_of(value) == value.clone().stride()
