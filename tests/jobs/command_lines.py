"""Command lines of ``distconv``: options as text, documented defaults, pairs of options, and calls as text."""

from __future__ import annotations

import argparse
import importlib
import platform
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from allpairspy import AllPairs
from mpi4py import MPI

from distconv import cli
from distconv.perfmodel import Machine
from distconv.perfmodel.graph.graph import LayerGraph
from tests.jobs.approved import assert_approved

TESTS = Path(__file__).parents[1]


def commands_in(file: str) -> list[str]:
    """The commands whose modules lie in the folder that the folder of a test file mirrors."""
    folder = ".".join(("distconv", *Path(file).parent.relative_to(TESTS).parts))
    return [" ".join(words) for words, command in cli.COMMANDS.items() if command.module.rpartition(".")[0] == folder]


def make_parser(command: str) -> cli.Parser:
    """The parser of ``distconv COMMAND``."""
    module = importlib.import_module(cli.COMMANDS[tuple(command.split())].module)
    return cli.make_parser(f"distconv {command}", module)


def parsed(command: str, *arguments: str) -> argparse.Namespace:
    """The options of a command line."""
    return make_parser(command).parse_args(arguments)


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """All options but ``--help``."""
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def describe_options(command: str) -> Iterator[str]:
    """Each option with what it reads, its default, and its help."""
    parser = make_parser(command)
    for action in actions_of(parser):
        name = "/".join(action.option_strings) or action.dest
        kind = getattr(action.type, "__name__", None) or type(action).__name__.strip("_")
        shape = f"{kind}{'' if action.nargs is None else f' nargs={action.nargs}'}{' required' * action.required}"
        choices = "" if action.choices is None else f" of {', '.join(map(str, action.choices))}"
        const = "" if action.const is None else f" const={action.const!r}"
        text = (action.help or "") % {"default": action.default} if action.help != argparse.SUPPRESS else "hidden"
        yield f"{name} {action.metavar or ''}: {shape}{choices}{const} = {action.default!r}\n    {text}"
    for group in parser._mutually_exclusive_groups:
        names = " or ".join(action.option_strings[0] for action in group._group_actions)
        yield f"at {'least and ' * group.required}most one of {names}"


def on_any_machine(text: str) -> str:
    """Without what depends on this machine."""
    launchers = (str(Path(sys.prefix) / "bin" / "mpiexec"), shutil.which("mpiexec"))
    names = {platform.node(): "NODE", **dict.fromkeys(launchers, "MPIEXEC"), tempfile.gettempdir(): "TEMPORARY"}
    for found, name in names.items():
        text = re.sub(rf"{re.escape(found)}(?![\w/])", name, text) if found else text
    return text.replace(str(TESTS.parent), "CHECKOUT")


def option_tests(*commands: str) -> tuple[Callable[[str], None], Callable[[str], None]]:
    """Two tests of the options of commands: what they read is as approved, and so documented are their defaults."""

    @pytest.mark.parametrize("command", commands)
    def options_are_approved(command: str) -> None:
        assert_approved(f"options/{command.replace(' ', '-')}", on_any_machine("\n".join(describe_options(command))))

    @pytest.mark.parametrize("command", commands)
    def defaults_are_documented(command: str) -> None:
        assert_documented_defaults(command)

    return options_are_approved, defaults_are_documented


def assert_refused(
    capsys: pytest.CaptureFixture[str], words: Sequence[str], message: str, *, among_notes: bool = False
) -> str:
    """``distconv WORDS`` ends with code 2 on this rank, and on rank 0 with one line that has ``message`` in it.

    With ``among_notes`` it may have told other things before. Returns what it printed elsewhere.
    """
    try:
        code = cli.main(list(words))
    except SystemExit as ended:  # argparse's way
        code = int(ended.code or 0)
    out, errors = capsys.readouterr()
    lines = errors.splitlines()
    if among_notes:
        lines = [line for line in lines if line.startswith("distconv ")]
    assert code == 2
    assert [message in line for line in lines] == ([True] if MPI.COMM_WORLD.rank == 0 else []), errors
    return out


def assert_documented_defaults(command: str) -> None:
    """The numbers and the word behind ``default:`` in the help of an option are what it has without the option."""
    for action in actions_of(make_parser(command)):
        said = re.search(r"default: ([^);]*)", (action.help or "") % {"default": action.default})
        if said is None or action.default is None:
            continue
        values = action.default if isinstance(action.default, (list, tuple)) else [action.default]
        words = re.split(r"[ ,]+", said[1])
        if all(re.fullmatch(r"[-+\d.e]+", word) for word in words):
            assert [float(word) for word in words] == [float(value) for value in values], action.dest
        elif len(words) == 1 and isinstance(action.default, (str, Path)):
            assert words == [str(action.default)], action.dest


def shown(value: Any) -> str:
    """Return an argument as text: of a graph, a machine or options what identifies it, and no address."""
    if isinstance(value, LayerGraph):
        first, last = value.operations[0], value.operations[-1]
        return f"graph {tuple(first.x.shape)}, {tuple(first.y.shape)}, ..., {tuple(last.y.shape)}"
    if isinstance(value, (Machine, argparse.Namespace)):
        return getattr(value, "name", "options")
    return "function" if callable(value) else re.sub(" at 0x[0-9a-f]+", "", repr(value))


def noting(lines: list[str], name: str, result: Any = None) -> Callable[..., Any]:
    """Return a function that adds a line with its arguments, and returns ``result``, or raises it if it is an error."""

    def call(*given: Any, **named: Any) -> Any:
        arguments = [*map(shown, given), *(f"{key}={shown(value)}" for key, value in named.items())]
        lines.append(f"    {name}: {', '.join(arguments)}")
        if isinstance(result, Exception):
            raise result
        return result

    return call


@dataclass(frozen=True)
class Line:
    """Words of a command line, and what is expected of them beside what holds without them."""

    words: tuple[str, ...]
    expected: Mapping[str, Any]

    def __str__(self) -> str:
        return " ".join(self.words) or "(no options)"


NOTHING: tuple[str, Mapping[str, Any]] = ("", {})


def pairs(*options: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Line]:
    """Command lines in which each pair of values of two options occurs, and the one without options.

    An option is a list of its words and what is expected of them. It may always be left out.
    """
    choices = [[NOTHING, *values] for values in options]
    rows = [list(row) for row in AllPairs([range(len(values)) for values in choices])]
    rows += [] if [0] * len(choices) in rows else [[0] * len(choices)]
    lines = []
    for row in rows:
        chosen = [values[index] for values, index in zip(choices, row, strict=True)]
        words = [word for text, _ in chosen for word in shlex.split(text)]
        lines.append(Line(tuple(words), {key: value for _, expected in chosen for key, value in expected.items()}))
    return lines
