"""Pages of the commands: the options of each command as its own parser has them.

Before Sphinx reads the pages, each command gets a file ``reference/commands/NAME.rst`` with the directive ``command``.
The directive ``command-table`` lists commands with their first sentence and a link.
"""

import argparse
import importlib
import re
import textwrap
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from distconv import cli
from distconv.whole_files import write_file

FOLDER = "reference/commands"


class CommandPage(SphinxDirective):
    """The description, the options and the examples of one command."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the page below its title."""
        words = tuple(self.arguments[0].split())
        return self.parse_text_to_nodes(describe(" ".join(words), cli.COMMANDS[words]), allow_section_headings=True)


class CommandTable(SphinxDirective):
    """A table of the commands whose first word is among the arguments."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return a table of names and first sentences."""
        groups = self.arguments[0].split()
        lines = [".. list-table::", "   :header-rows: 1", "", "   * - command", "     - purpose"]
        for words, command in cli.COMMANDS.items():
            if words[0] in groups:
                first = re.split(r"(?<=[.:])\s", make_parser(" ".join(words), command).description or "", maxsplit=1)[0]
                name = " ".join(words)
                lines += [
                    f"   * - :doc:`{name} <commands/{file_name(words)}>`",
                    f"     - {_escaped(first.rstrip(':'))}",
                ]
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directives, and write the pages before Sphinx reads them."""
    app.add_directive("command", CommandPage)
    app.add_directive("command-table", CommandTable)
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_pages(app: Sphinx) -> None:
    """Write a page for each command. Unchanged pages keep their time, so that Sphinx does not read them again."""
    pages = {}
    for words in cli.COMMANDS:
        title = f"distconv {' '.join(words)}"
        label = f".. _command-{'-'.join(words)}:"
        pages[f"{file_name(words)}.rst"] = f"{label}\n\n{title}\n{'=' * len(title)}\n\n.. command:: {' '.join(words)}\n"
    write_folder(Path(app.srcdir) / FOLDER, pages)


def write_folder(folder: Path, pages: dict[str, str]) -> None:
    """Make ``pages`` the content of a folder. Unchanged files are not written."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            write_file(path, text)


def file_name(words: tuple[str, ...]) -> str:
    """Return the name of a command's page."""
    return "-".join(words)


def make_parser(words: str, command: cli.Command) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    return cli.make_parser(f"distconv {words}", importlib.import_module(command.module))


def describe(words: str, command: cli.Command) -> str:
    """Return description, examples and options of a command as reStructuredText."""
    parser = make_parser(words, command)
    lines = [f".. program:: distconv {words}", ""]
    for paragraph in re.split(r"\n\s*\n", parser.description or ""):
        lines += _literal(paragraph, "text") if paragraph.startswith((" ", "::")) else [_escaped(paragraph), ""]
    if parser.epilog:
        examples = re.sub(r"^\s*examples:\n", "", parser.epilog)
        lines += [*_heading("Examples"), *_literal(examples, "bash")]
    lines += _heading("Options")
    for action in parser._actions:
        lines += _option(parser, action)
    return "\n".join(lines) + "\n"


def _heading(title: str) -> list[str]:
    return [title, "-" * len(title), ""]


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    formatter = parser._get_formatter()
    values = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
    names = ", ".join(f"{name} {values}".strip() for name in action.option_strings) or values
    text = formatter._expand_help(action) if action.help else ""
    return [f".. option:: {names}", "", textwrap.indent(_escaped(text), "   "), ""]


def _literal(text: str, language: str) -> list[str]:
    return [f".. code-block:: {language}", "", textwrap.indent(textwrap.dedent(text).strip("\n"), "   "), ""]


def _escaped(text: str) -> str:
    """Return the text of a help message with code in double backticks. Options are code."""
    code = r"`([^`\n]+)`|(?<![\w-])(--[a-z][\w-]*)|([\\*`|_<>])"
    return re.sub(code, lambda found: rf"\{found[3]}" if found[3] else f"``{found[1] or found[2]}``", text)
