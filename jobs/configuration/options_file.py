"""Options in a YAML file: read (``--config``), printed (``--print-config``), and saved with a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from distconv.errors import DistconvError
from distconv.text_files import describe_value, parse_yaml, read_text

NAME = "config.yaml"
_OF_THE_CALL = ("config", "print_config", "resume", "overwrite")
"""Options of one call, which are not part of the run's configuration."""


class OptionsError(DistconvError, ValueError):
    """Invalid options in a YAML file."""


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and ``--print-config``."""
    parser.add_argument(
        "--config",
        action=_Config,
        type=Path,
        metavar="FILE",
        help="YAML file of options by name, such as lr: 0.1; options after --config override it",
    )
    parser.add_argument(
        "--print-config", "--print_config", action="store_true", help="print all options as a YAML file, and exit"
    )


class _Config(argparse.Action):
    """Parse the options of the file at the position of ``--config``, so that later options override them."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        try:
            options = parse_yaml(read_text(values, "options", OptionsError), f"options {values}", OptionsError)
        except OptionsError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        if not isinstance(options, Mapping):
            raise argparse.ArgumentError(
                self,
                f"{values}: not a mapping of options ({describe_value(options)}). Write options by name, such as "
                "lr: 0.1.",
            )
        words = list(self._words(parser, options, values))
        parser.parse_args(words, namespace)
        setattr(namespace, self.dest, values)

    def _words(self, parser: argparse.ArgumentParser, options: Mapping[Any, Any], path: Path) -> Iterator[str]:
        actions = {action.dest: action for action in parser._actions if action.option_strings}
        for name, value in options.items():
            action = actions.get(str(name).replace("-", "_"))
            if action is None or action.dest in _OF_THE_CALL:
                raise argparse.ArgumentError(self, f"{path}: {name!r} is not an option that a file can set")
            option = action.option_strings[-1]
            if action.nargs == 0:  # A switch takes no value: it is passed for its other value only.
                if value == action.const:
                    yield option
                elif value != action.default:
                    raise argparse.ArgumentError(self, f"{path}: {name} must be true or false (found {value!r})")
            # In one word: a value that begins with a minus would otherwise be taken for an option.
            elif isinstance(value, (Mapping, list)):
                written: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
                yield f"{option}={written.strip()}"
            elif value is not None:
                yield f"{option}={value}"


def format_options(options: argparse.Namespace, without: Sequence[str] = ()) -> str:
    """Format options as a YAML file that ``--config`` accepts.

    Parameters
    ----------
    options : argparse.Namespace
    without : sequence of str
        Names of options to leave out.

    Returns
    -------
    str
        Contents of the file.
    """
    values = {}
    for name, value in vars(options).items():
        if name in _OF_THE_CALL or name in without or value is None:
            continue
        values[name] = _plain(name, value)
    return str(yaml.safe_dump(values, sort_keys=True, default_flow_style=False))


def _plain(name: str, value: Any) -> Any:
    """Return a parsed option as a value of YAML: as it is, or as the user writes it on the command line."""
    if name == "grid":
        return ",".join(f"{axis}={parts}" for axis, parts in value.items())
    if name == "devices" and not isinstance(value, str):  # "gpu" and "host" stay as they are
        return ",".join(f"{kind}:{count}" for kind, count in value.items())
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, range):
        return f"{value.start}:{value.stop}"
    return value if isinstance(value, (bool, int, float, str, dict, list)) else str(value)


def parse_mapping(text: str) -> dict[str, Any]:
    """Parse keyword arguments in YAML, such as ``{betas: [0.9, 0.95]}``.

    Raises
    ------
    ArgumentTypeError
        If the string is not a YAML mapping.
    """
    try:
        content = parse_yaml(text, "", OptionsError)
    except OptionsError:
        content = None
    if not isinstance(content, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mapping, such as {{NAME: VALUE, ...}}")
    return content
