"""Any optimizer and scheduler of torch, with their arguments.

The training options and settings use it. Errors name the command-line option.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from distconv.errors import DistconvError

ABBREVIATIONS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
_SCHEDULED = ("lr", "momentum", "betas", "weight_decay")
"""Values of a parameter group that are copied from the scheduler; some schedulers change the momentum, too."""


def optimizer_name(text: str) -> str:
    """Check an optimizer's name: ``sgd``, ``adam``, ``adamw`` or a class of ``torch.optim``.

    Raises
    ------
    ArgumentTypeError
        If there is no such optimizer, or it evaluates the loss several times per step.
    """
    kind = getattr(torch.optim, ABBREVIATIONS.get(text, text), None)
    usable = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    if not usable or kind is torch.optim.LBFGS:
        raise argparse.ArgumentTypeError(f"{text!r} is not sgd, adam, adamw or another class of torch.optim")
    return text


def scheduler_name(text: str) -> str:
    """Check a scheduler's name: a class of ``torch.optim.lr_scheduler`` that depends on the step alone, or empty.

    Raises
    ------
    ArgumentTypeError
        If there is no such scheduler.
    """
    kind = getattr(torch.optim.lr_scheduler, text, None)
    usable = isinstance(kind, type) and issubclass(kind, torch.optim.lr_scheduler.LRScheduler)
    if text and (not usable or text in ("LRScheduler", "ReduceLROnPlateau")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a class of torch.optim.lr_scheduler that is stepped without arguments"
        )
    return text


def make_torch_optimizer(
    name: str, parameters: Iterable[torch.nn.Parameter], **arguments: Any
) -> torch.optim.Optimizer:
    """Make an optimizer.

    Parameters
    ----------
    name : str
        As in :func:`optimizer_name`.
    parameters : iterable of torch.nn.Parameter
    **arguments
        Keyword arguments of its class.

    Returns
    -------
    torch.optim.Optimizer

    Raises
    ------
    DistconvError
        If the optimizer does not accept the arguments.
    """
    kind = getattr(torch.optim, ABBREVIATIONS.get(name, name))
    return _construct(f"--optimizer {name}", lambda: kind(parameters, **arguments))  # type: ignore[no-any-return]


def _construct(what: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise DistconvError(f"{what}: {' '.join(str(error).split())}") from error


class RateSchedule:
    """Learning rate, and other scheduled values, of each step, as a scheduler of torch computes them.

    The scheduler runs on a separate optimizer of one parameter. A resumed run can thus compute the values of any step.
    Call :meth:`begin` before :meth:`values_at`.

    Parameters
    ----------
    optimizer : callable
        Makes the optimizer from parameters.
    """

    def __init__(self, optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]) -> None:
        self._make, self._step = optimizer, -1
        self._start: Callable[[], None]

    def begin(self, name: str, arguments: Mapping[str, Any], *, steps: int, peak: float) -> RateSchedule:
        """Create the scheduler.

        Parameters
        ----------
        name : str
            Class of ``torch.optim.lr_scheduler``.
        arguments : mapping
            Keyword arguments of the class. They override ``steps`` and ``peak``.
        steps : int
            Steps of the run, passed as ``total_steps`` or ``T_max`` to schedulers that have them.
        peak : float
            Peak learning rate, passed as ``max_lr``.

        Returns
        -------
        RateSchedule
            The schedule itself.

        Raises
        ------
        DistconvError
            If the scheduler does not accept the arguments.
        """
        kind = getattr(torch.optim.lr_scheduler, name)
        taken = inspect.signature(kind).parameters
        own = {"total_steps": steps, "T_max": steps, "max_lr": peak}
        # OneCycleLR accepts the number of steps in one of two forms, not in both.
        if {"epochs", "steps_per_epoch"} & set(arguments):
            del own["total_steps"]
        given = {key: value for key, value in own.items() if key in taken} | dict(arguments)

        def start() -> None:
            self._optimizer = self._make([torch.nn.Parameter(torch.zeros(1))])
            self._scheduler = kind(self._optimizer, **given)

        def checked() -> None:
            _construct(f"--scheduler {name}", start)

        self._start = checked
        self._start()
        self._step = 0
        return self

    def values_at(self, step: int) -> dict[str, Any]:
        """Return the scheduled values of a parameter group for ``step``, counted from 0.

        An earlier step than in the previous call restarts the scheduler.
        """
        if step < self._step:
            self._start()
            self._step = 0
        while self._step < step:
            self._optimizer.step()  # without a gradient, hence without effect; torch warns if it is left out
            self._scheduler.step()
            self._step += 1
        group = self._optimizer.param_groups[0]
        return {name: group[name] for name in _SCHEDULED if name in group}
