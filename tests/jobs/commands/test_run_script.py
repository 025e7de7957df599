"""``distconv run``: what a script sees, and how it ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from distconv import cli
from tests.jobs.command_lines import assert_refused


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``script(text)``: the path of a script; what it changes of ``sys`` is undone."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text: str) -> Path:
        (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("module", [False, True])
def test_a_script_has_its_arguments_its_folder_and_the_name_main(
    script: Any, module: bool, monkeypatch: Any, capsys: Any
) -> None:
    path = script("import sys, beside; print(__name__, sys.argv[1:], beside.NAME)\n")
    monkeypatch.chdir(path.parent)
    given = ["-m", "train"] if module else [str(path)]
    assert cli.main(["run", *given, "--epochs", "3", "-m", "x"]) == 0
    assert capsys.readouterr().out == "__main__ ['--epochs', '3', '-m', 'x'] beside\n"
    sys.modules.pop("beside")


def test_an_error_of_a_script_ends_with_its_traceback_and_an_exit_with_its_code(script: Any, capsys: Any) -> None:
    path = script("import distconv as dc\nraise dc.PlanError('mine')\n")
    assert cli.main(["run", str(path)]) == 1
    error = capsys.readouterr().err
    assert f'File "{path}", line 2' in error and error.endswith("PlanError: mine\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", str(script("raise SystemExit(3)\n"))])
    assert ended.value.code == 3


def test_a_file_that_is_not_there_is_one_line(capsys: Any) -> None:
    text = "/nowhere/train.py: no such file. Name an existing file, or put -m before"
    assert_refused(capsys, ["run", "/nowhere/train.py"], text)


def test_what_a_module_misses_is_its_own_error(script: Any, capsys: Any, monkeypatch: Any) -> None:
    package = script("").parent / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import no_such_library\n")
    monkeypatch.chdir(package.parent)
    assert cli.main(["run", "-m", "package.train"]) == 1
    assert "No module named 'no_such_library'" in capsys.readouterr().err
