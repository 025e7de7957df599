"""The command line: help, lazy loading, one line and exit code 2 on bad input, printing on rank 0 alone."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import distconv
from distconv import cli
from tests.jobs.approved import assert_approved

ROOT = Path(__file__).resolve().parents[2]


def outcome(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("arguments", [[], ["-h"]])
def test_help_lists_all_commands_and_shows_examples(
    comm: Any, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, out, err = outcome(arguments, capsys)
    assert (code, err) == (0, "")
    for part in ("train mesh", "data mesh", "bench memory", "info", "examples:"):
        assert (part in out) == (comm.rank == 0)


@pytest.mark.parametrize("group", [None, "train", "verify"])
def test_the_list_of_commands_is_as_approved(group: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome([group or "--help"], capsys)
    assert code == 0
    assert_approved(f"commands/{group or 'all'}", out)


@pytest.mark.fault(89)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "distconv: unknown command 'fly'; the commands are train mesh, data mesh"),
        (["train", "fly"], "distconv: unknown command 'train fly'; the commands are train mesh"),
        (["verify", "fly"], "unknown command 'verify fly'; the commands are verify conformance, verify differential, "),
        (
            ["reproduce", "fly"],
            "the commands are reproduce dryden, reproduce bapipe, reproduce bppsa, reproduce sparsepipe, ",
        ),
        (["verify", "exactness", "--size", "axb"], "argument --size: 'axb' is not the extents of an image"),
        (["verify", "exactness", "--size", "4x4x4"], "--size 4x4x4: samples of unet have 2 extents, not 3"),
        (["verify", "exactness", "--grid", "h=7"], "process grid h=7 has 7 parts but the communicator has"),
        (["reproduce", "dryden", "--out", "/nowhere/a.md"], "--out /nowhere/a.md: no such folder (/nowhere)"),
        (["reproduce", "sparsepipe", "/nowhere.txt"], "profile /nowhere.txt cannot be read"),
        (["train", "mesh", "--grid", "x=2"], "argument --grid: grid 'x=2': 'x=2' is not one axis=parts"),
        (["train", "mesh", "--batch", "0"], "argument --batch: '0' is not a positive integer"),
        (
            ["train", "mesh", "--checkpoint-every", "-1"],
            "argument --checkpoint-every: '-1' is not a non-negative integer",
        ),
        (["train", "mesh", "--data", "mesh.h5", "--out", ""], "argument --out: is empty"),
        (["train", "mesh", "--lr", "nan"], "argument --lr: 'nan' is not a positive number"),
        (["train", "mesh", "--model", "vgg"], "argument --model: invalid choice: 'vgg'"),
        (["train", "mesh", "--speed"], "unrecognized arguments: --speed"),
        (["train", "mesh"], "--data: missing. Make a file with: distconv data mesh"),
        (["train", "mesh", "--data", "/nowhere.h5"], "[Errno 2] No such file or directory: '/nowhere.h5'"),
        (["data", "mesh"], "--out: missing. Name the file"),
        (["train", "nonsense", "-h"], "unknown command 'train nonsense'"),
        (["run", "-m", "no_such.module"], "no_such.module: no such module in this folder or installed"),
    ],
)
def test_bad_input_is_one_line_on_rank_0_and_code_2(
    comm: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    for name in ("path", "argv"):  # which distconv run changes for the script
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    code, out, err = outcome(arguments, capsys)
    assert (code, out) == (2, "")
    if comm.rank == 0:
        assert message in err
        assert err.count("\n") == 1
    else:
        assert err == ""


@pytest.mark.ranks(1, 2)
def test_info_names_the_ranks_once(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(["info"], capsys)
    assert code == 0
    assert bool(re.search(rf"^ranks +{comm.size} on 1 node$", out, re.M)) == (comm.rank == 0)


@pytest.mark.long
def test_a_command_loads_no_other_job() -> None:
    code = "import sys; from distconv.cli import main; main(['info']); "
    code += "print([name for name in sys.modules if name.startswith('distconv.jobs.commands.')])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    assert finished.stdout.splitlines()[-1] == "['distconv.jobs.commands.information']"


@pytest.mark.ranks(1, 2)
def test_it_says_its_version(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out = f"distconv {distconv.__version__}\n" if comm.rank == 0 else ""
    assert outcome(["--version"], capsys) == (0, out, "")
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{distconv.__version__}"\n' in project


PLANNED = "plan --model lenet5 --input 1,28,28 --batch 4 --ranks 2 --machine lassen".split()


@pytest.fixture
def closed() -> Iterator[int]:
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("words", [pytest.param(words, id=" ".join(words)) for words in cli.COMMANDS])
def test_help_begins_with_a_sentence_describes_each_option_and_has_examples(words: tuple[str, ...]) -> None:
    parser = cli.make_parser(" ".join(("distconv", *words)), importlib.import_module(cli.COMMANDS[words].module))
    assert re.match(r"[A-Z][a-z]+,? [^\n]+\.(\n|$)", parser.description or "")
    examples = (parser.epilog or "").removeprefix("examples:\n")
    assert len(re.findall(rf"distconv .*\b{words[-1]}", examples)) >= 2
    helps = {action.dest: action.help for action in parser._actions if action.help != argparse.SUPPRESS}
    assert not [name for name, text in helps.items() if not text or re.match(r"(of|its|default)\b", text)]


@pytest.mark.fault(88)
@pytest.mark.ranks(1)
@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["info"], PLANNED])
def test_a_command_whose_output_nobody_reads_ends_with_the_code_of_that(
    comm: Any, closed: int, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(closed, "w", closefd=False) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        try:
            code = cli.main(arguments)
        except SystemExit as stopped:  # argparse goes on
            code = int(stopped.code or 0)
        stream.flush()
    assert code in ((0, 141) if "--help" in arguments else (141,))
    assert capsys.readouterr().err == ""


def test_help_has_no_marks_of_our_sources() -> None:
    for command in cli.COMMANDS.values():
        text = cli.make_parser("distconv", importlib.import_module(command.module)).format_help()
        assert not re.search(r"``|:\w+:`", text), command.module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            "distconv.jobs.wings.fly",
            r"distconv fly: .*checkout of distconv's repository run python -m distconv fly",
        ),
        ("wingless", "distconv fly: wingless cannot be loaded: No module named 'wings'. Reinstall distconv"),
    ],
)
def test_a_module_that_is_missing_does_no_harm_until_it_is_called(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, message: str
) -> None:
    (tmp_path / "wingless.py").write_text("import wings")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.COMMANDS, ("fly",), cli.Command(module, "fly away"))
    assert outcome(["info"], capsys)[0] == 0
    code, _, err = outcome(["fly"], capsys)
    assert code == 2 and len(err.splitlines()) == 1
    assert re.match(message, err)


def printed_commands() -> Iterator[tuple[str, list[str]]]:
    """Where each command of the documents and of the examples stands, and its words behind ``distconv``."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    texts |= {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "jobs" / "papers").glob("*/*.md")}
    texts |= {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
    shells = r"^```(?:bash|console)(?: \w+)?\n(.*?)^```"
    texts = {name: "\n".join(re.findall(shells, text, re.M | re.S)) for name, text in texts.items()}
    for command in cli.COMMANDS.values():
        texts[command.module] = getattr(importlib.import_module(command.module), "EXAMPLES", "")
    texts["distconv --help"] = cli.EXAMPLES
    for name, text in texts.items():
        for line in text.replace("\\\n", " ").splitlines():
            launchers = r"(?:mpiexec -n \d+ |srun (?:--\S+ |-\w \d+ )*(?:apptainer exec --nv \S+ )?)?"
            if found := re.match(rf"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*{launchers}distconv (.*)", line):
                words = shlex.split(found[1].partition(" || ")[0], comments=True)
                yield name, [word for word in words if not re.fullmatch(r"\$\{\w+\[@\]\}", word)]


def test_every_printed_command_is_one_that_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    printed = list(printed_commands())
    assert {tuple(words[:2]) for _, words in printed} >= {key for key in cli.COMMANDS if len(key) == 2}
    for place, given in printed:
        words = cli._match_command(given)
        assert words is not None, (place, given)
        job = importlib.import_module(cli.COMMANDS[words].module)
        try:
            cli.make_parser("distconv", job).parse_args(given[len(words) :])
        except SystemExit as stopped:
            assert stopped.code == 0, (place, given, capsys.readouterr().err)
