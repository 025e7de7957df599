"""Any optimizer and scheduler of torch, with their arguments."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from distconv.errors import DistconvError

SHORT = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
_SCHEDULED = ("lr", "momentum", "betas", "weight_decay")
"""What a scheduler may change."""


def optimizer_name(text: str) -> str:
    """``sgd``, ``adam``, ``adamw`` or a class of ``torch.optim``.

    Raises
    ------
    ArgumentTypeError
        If it is none, or one that computes the loss several times.
    """
    kind = getattr(torch.optim, SHORT.get(text, text), None)
    usable = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    if not usable or kind is torch.optim.LBFGS:
        raise argparse.ArgumentTypeError(f"{text!r} is not sgd, adam, adamw or another class of torch.optim")
    return text


def scheduler_name(text: str) -> str:
    """A class of ``torch.optim.lr_scheduler`` that needs no more than the number of the step, or nothing.

    Raises
    ------
    ArgumentTypeError
        If it is none.
    """
    kind = getattr(torch.optim.lr_scheduler, text, None)
    usable = isinstance(kind, type) and issubclass(kind, torch.optim.lr_scheduler.LRScheduler)
    if text and (not usable or text in ("LRScheduler", "ReduceLROnPlateau")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a class of torch.optim.lr_scheduler that goes by steps")
    return text


def make(name: str, parameters: Iterable[torch.nn.Parameter], **arguments: Any) -> torch.optim.Optimizer:
    """The optimizer of this name.

    Raises
    ------
    DistconvError
        If it does not take the arguments.
    """
    kind = getattr(torch.optim, SHORT.get(name, name))
    return _made(f"--optimizer {name}", lambda: kind(parameters, **arguments))  # type: ignore[no-any-return]


def _made(what: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise DistconvError(f"{what}: {' '.join(str(error).split())}") from error


class RateSchedule:
    """What a scheduler of torch makes of an optimizer's numbers, step by step.

    It is computed beside the training, by an optimizer of one number, so that a run that goes on in the middle has it.
    """

    def __init__(self, optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]) -> None:
        self._make, self._step = optimizer, -1
        self._start: Callable[[], None]

    def begin(self, name: str, arguments: Mapping[str, Any], *, steps: int, peak: float) -> RateSchedule:
        """Of the scheduler ``name``; the steps of the run and the peak rate are its own unless ``arguments`` say so.

        Raises
        ------
        DistconvError
            If it does not take the arguments.
        """
        kind = getattr(torch.optim.lr_scheduler, name)
        taken = inspect.signature(kind).parameters
        own = {"total_steps": steps, "T_max": steps, "max_lr": peak}
        if {"epochs", "steps_per_epoch"} & set(arguments):
            del own["total_steps"]
        given = {key: value for key, value in own.items() if key in taken} | dict(arguments)

        def start() -> None:
            self._optimizer = self._make([torch.nn.Parameter(torch.zeros(1))])
            self._scheduler = kind(self._optimizer, **given)

        def checked() -> None:
            _made(f"--scheduler {name}", start)

        self._start = checked
        self._start()
        self._step = 0
        return self

    def at(self, step: int) -> dict[str, Any]:
        """The numbers of the optimizer for this step, counted from 0."""
        if step < self._step:
            self._start()
            self._step = 0
        while self._step < step:
            self._optimizer.step()
            self._scheduler.step()
            self._step += 1
        group = self._optimizer.param_groups[0]
        return {name: group[name] for name in _SCHEDULED if name in group}
