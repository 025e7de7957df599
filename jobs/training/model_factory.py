"""Models by name: a reference model, or a user's ``package.module:factory``.

Called by the commands that train, predict and plan. Every error of the user's code becomes a ModelError.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from mpi4py import MPI

from distconv.communication.agreement import try_on_all_ranks
from distconv.errors import DistconvError
from distconv.layers.models import MODELS

T = TypeVar("T")

_NOTHING = inspect.Parameter.empty
_VARIADIC, _VARIADIC_BY_NAME = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD

CLASSIFIERS = tuple(name for name, model in MODELS.items() if model.predicts == "class")
"""The reference models that predict a class for each sample."""
SEGMENTERS = tuple(name for name, model in MODELS.items() if model.predicts == "cells")
"""The reference models that predict a class for each position of a sample."""

_KINDS = {"model": tuple(MODELS), "classifier": CLASSIFIERS, "segmentation network": SEGMENTERS}


class ModelError(DistconvError, ValueError):
    """A model that does not exist, cannot be imported or built, or does not suit the task."""


def build_classifier(
    name: str, comm: MPI.Intracomm, *, seed: int, in_channels: int, classes: int, width: int | None = None
) -> torch.nn.Module:
    """Build a classifier: as :func:`build_model`, with ``CLASSIFIERS`` as reference models. Collective.

    Parameters
    ----------
    name, comm, seed, in_channels, classes, width
        As in :func:`build_model`.

    Returns
    -------
    torch.nn.Module
    """
    return try_on_all_ranks(
        comm,
        lambda: _build(name, "classifier", seed=seed, in_channels=in_channels, classes=classes, width=width),
        ModelError,
    )


def build_segmenter(
    name: str, comm: MPI.Intracomm, *, seed: int, in_channels: int, classes: int, width: int | None = None
) -> torch.nn.Module:
    """Build a segmentation network: as :func:`build_model`, with ``SEGMENTERS`` as reference models. Collective.

    Parameters
    ----------
    name, comm, seed, in_channels, classes, width
        As in :func:`build_model`.

    Returns
    -------
    torch.nn.Module
    """
    kind = "segmentation network"
    return try_on_all_ranks(
        comm,
        lambda: _build(name, kind, seed=seed, in_channels=in_channels, classes=classes, width=width),
        ModelError,
    )


def build_model(
    name: str, comm: MPI.Intracomm, *, seed: int, in_channels: int, classes: int | None = None, width: int | None = None
) -> torch.nn.Module:
    """Build a model whose weights depend on the seed alone. Collective: call on every rank.

    A factory receives those of ``in_channels``, ``classes`` (or ``num_classes``) and ``width`` that it accepts and that
    are not None. Modules in the current directory are found, too.

    Parameters
    ----------
    name : str
        A reference model, or ``package.module:factory``.
    comm : mpi4py.MPI.Intracomm
        Ranks that build the model.
    seed, in_channels, classes, width : int
        ``classes`` and ``width`` may be None, which selects the model's own.

    Returns
    -------
    torch.nn.Module
        The model.

    Raises
    ------
    ModelError
        On all ranks, in one line, if there is no such model, it cannot be imported or built, or is not an nn.Module.
    """
    return try_on_all_ranks(
        comm,
        lambda: _build(name, "model", seed=seed, in_channels=in_channels, classes=classes, width=width),
        ModelError,
    )


def _build(
    name: str, kind: str, *, seed: int, in_channels: int, classes: int | None, width: int | None
) -> torch.nn.Module:
    factory = _factory(name, kind)
    arguments = _arguments(name, factory, in_channels, classes, width)
    torch.manual_seed(seed)  # after the import of user code, which may draw random numbers
    with _search_current_directory():
        model = _call_user_code(name, lambda: factory(**arguments))
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"--model {name}: returned {type(model).__name__}, but must return a torch.nn.Module")
    return model


def _factory(name: str, kind: str) -> Callable[..., Any]:
    if ":" not in name:
        names = _KINDS[kind]
        if name not in names:
            raise ModelError(
                f"--model {name}: no such {kind}. Use {', '.join(names)}, or your own as package.module:factory."
            )
        return MODELS[name].factory
    module, _, attribute = name.partition(":")
    source: Any = _module(name, module)
    if not hasattr(source, attribute):
        raise ModelError(f"--model {name}: {getattr(source, '__file__', module)} has no {attribute!r}")
    factory = getattr(source, attribute)
    if not callable(factory):
        raise ModelError(
            f"--model {name}: {attribute!r} is {type(factory).__name__}, but must be a class or a function"
        )
    return factory  # type: ignore[no-any-return]


def _module(name: str, module: str) -> Any:
    def load() -> Any:
        try:
            with _search_current_directory():
                return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name and (module == error.name or module.startswith(f"{error.name}.")):
                raise ModelError(
                    f"--model {name}: no module {error.name!r} in {os.getcwd()} or on Python's path"
                ) from error
            raise

    return _call_user_code(name, load)


@contextlib.contextmanager
def _search_current_directory() -> Iterator[None]:
    """Search the current directory first inside the context, and last afterwards, where it shadows no module."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)


def _arguments(
    name: str, factory: Callable[..., Any], in_channels: int, classes: int | None, width: int | None
) -> dict[str, int]:
    try:
        parameters = dict(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # no Python function
        parameters = {}
    taken = set(parameters)
    if width is not None and "width" not in taken:
        raise ModelError(f"--width {width}: the model {name} has no parameter width. Remove --width.")
    offered = {"in_channels": in_channels, "width": width, "classes": classes, "num_classes": classes}
    given = {key: value for key, value in offered.items() if key in taken and value is not None}
    needed = [key for key, parameter in parameters.items() if parameter.default is _NOTHING and key not in given]
    lacking = [key for key in needed if parameters[key].kind not in (_VARIADIC, _VARIADIC_BY_NAME)]
    if lacking:
        option = {"classes": "--classes", "num_classes": "--classes", "width": "--width"}.get(lacking[0])
        fix = f"give {option}" if option else "give it a default: only in_channels, classes and width are passed"
        raise ModelError(f"--model {name} needs {lacking[0]!r}; {fix}")
    return given


def _call_user_code(name: str, call: Callable[[], T]) -> T:
    """Call user code; turn any exception into a ModelError of one line with the location."""
    try:
        return call()
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        # The innermost frame: the line of the user's code, or of what it called, that raised.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        raise ModelError(
            f"--model {name}: {type(error).__name__}: {text} ({frame.filename}, line {frame.lineno})"
        ) from error
