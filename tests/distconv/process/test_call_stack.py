"""Names of called layers and functions, as users know them."""

from __future__ import annotations

import sys
import threading
from types import FrameType

import torch
from torch import nn

from distconv.process.call_stack import Position, describe_call, layer_name, position, running_modules, user_frame


class Noting(nn.Module):
    """Notes where it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.modules_called = running_modules()
        here = sys._getframe()
        assert here.f_back is not None
        self.described, self.described_behind = describe_call(here), describe_call(here.f_back)
        self.behind = user_frame(here.f_back)
        return x


def test_the_users_line_and_the_layer_are_named() -> None:
    layer = Noting()
    model = nn.Sequential(nn.Identity(), nn.Sequential(layer))
    model(torch.ones(1))
    assert layer_name(layer.modules_called) == "'1.0' (Noting)"
    assert layer.described.startswith("self.described, self.described_behind = describe_call(here)")
    assert layer.described.endswith(": '1.0' (Noting)")
    # A line of torch's or ours says nothing to a user.
    assert layer.behind is sys._getframe()
    assert layer.described_behind.startswith(f"model(torch.ones(1)) ({__file__}, line ")


def test_a_layer_that_is_no_part_of_the_one_before_goes_by_its_class() -> None:
    assert layer_name([nn.Sequential(), nn.ReLU()]) == "'ReLU' (ReLU)"
    assert layer_name([nn.ReLU()]) == "ReLU"


def test_a_function_of_torch_is_named_where_a_tensor_of_ours_was_given() -> None:
    class Ours(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found.append(describe_call(sys._getframe()))
            return torch.ones(1)

    found: list[str] = []
    torch.cat([torch.ones(1).as_subclass(Ours)])
    assert found[-1].endswith(": cat")


def test_a_thread_without_a_line_of_the_users_gives_where_it_began() -> None:
    frame: FrameType | None = None
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert thread.ident is not None
        frame = sys._current_frames()[thread.ident]
        assert "threading.py" in describe_call(frame)
    finally:
        done.set()
        thread.join()


def test_a_position_has_the_lines_that_call_the_model_and_the_call_within_them() -> None:
    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            here = sys._getframe()
            found.extend(position(here, blocked=blocked) for blocked in (True, False))
            return x

    def evaluate() -> None:
        model(torch.ones(1))

    found: list[Position] = []
    model = nn.Sequential(nn.Identity(), Waits())
    evaluate()
    blocked, running = found
    first = evaluate.__code__.co_firstlineno + 1
    assert blocked.call == "'1' (Waits)"
    assert blocked.lines[0] == (__file__, first) and blocked.text == "model(torch.ones(1))"
    assert blocked.lines[1][0] == __file__
    assert f"{__file__}, line {first}: model(torch.ones(1)) (called from line " in str(blocked)
    assert (
        running.call.startswith(f"the forward pass of a module, {__file__}, line ") and running.lines == blocked.lines
    )


def test_a_position_in_the_script_itself_has_no_call() -> None:
    here = position(sys._getframe())
    assert here.call == "" and here.where.startswith(f"{__file__}, line ")
    assert str(Position("", (("train.py", 3),))) == "train.py, line 3"
