"""The directive ``commands``: each command of ``distconv`` with its options, as its own parser has them."""

import argparse
import importlib
import re
import textwrap

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from distconv import cli


class Commands(SphinxDirective):
    """The commands whose first word is among the arguments, in the order of ``distconv --help``."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return a section for each command."""
        groups = self.arguments[0].split()
        sections = [
            described(" ".join(words), command) for words, command in cli.COMMANDS.items() if words[0] in groups
        ]
        return self.parse_text_to_nodes("\n".join(sections), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive to Sphinx."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def described(words: str, command: cli.Command) -> str:
    """Return the section of a command as reStructuredText: its description, options and examples."""
    parser = cli.make_parser(f"distconv {words}", importlib.import_module(command.module))
    title, label = f"distconv {words}", f".. _command-{words.replace(' ', '-')}:"
    lines = [label, "", title, "~" * len(title), "", f".. program:: {title}", ""]
    for paragraph in re.split(r"\n\s*\n", parser.description or ""):
        lines += _literal(paragraph, "text") if paragraph.startswith((" ", "::")) else [_escaped(paragraph), ""]
    for action in parser._actions:
        lines += _option(parser, action)
    if parser.epilog:
        lines += ["Examples:", "", *_literal(re.sub(r"^\s*examples:\n", "", parser.epilog), "bash")]
    return "\n".join(lines) + "\n"


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    formatter = parser._get_formatter()
    values = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
    names = ", ".join(f"{name} {values}".strip() for name in action.option_strings) or values
    text = formatter._expand_help(action) if action.help else ""
    return [f".. option:: {names}", "", textwrap.indent(_escaped(text), "   "), ""]


def _literal(text: str, language: str) -> list[str]:
    return [f".. code-block:: {language}", "", textwrap.indent(textwrap.dedent(text).strip("\n"), "   "), ""]


def _escaped(text: str) -> str:
    """``text`` of a help message, where code stands between single backticks, and options without."""
    code = r"`([^`\n]+)`|(?<![\w-])(--[a-z][\w-]*)|([\\*`|_<>])"
    return re.sub(code, lambda found: rf"\{found[3]}" if found[3] else f"``{found[1] or found[2]}``", text)
