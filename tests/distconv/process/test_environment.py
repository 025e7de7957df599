"""The environment variables: what they take, what a bad value raises, and that their page lists them as they are."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from mpi4py import MPI

import distconv as dc
from distconv import cli
from distconv.process import environment
from distconv.process.environment import CHECK, MALLOC, TIMEOUT_S, TRANSPORT, VARIABLES, check
from distconv.process.memory import allocator
from tests.distconv.layouts import raises_everywhere

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (CHECK, "all", "all"),
        (TIMEOUT_S, "2.5", 2.5),
        (MALLOC, "1", "1"),
        (MALLOC, "mimalloc", "mimalloc"),
        (TRANSPORT, "cuda-aware", "cuda-aware"),
    ],
)
def test_a_variable_has_the_value_that_is_written(variable, text, value):
    assert variable.value({variable.name: text}) == value


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_a_variable_that_is_empty_is_as_one_that_is_not_set(variable):
    assert variable.value({}) == variable.value({variable.name: ""}) == variable.unset


BAD = [
    ("DISTCONV_TIMEOUT_S", "nan", "seconds from 0 on"),
    ("DISTCONV_TIMEOUT_S", "inf", "seconds from 0 on"),
    ("DISTCONV_TIMEOUT_S", "-1", "seconds from 0 on"),
    ("DISTCONV_TIMEOUT_S", "ten", "seconds from 0 on"),
    ("DISTCONV_CHECK", "sometimes", "off, plan or all"),
    ("DISTCONV_MALLOC", "yes", "0, 1, tcmalloc, jemalloc, mimalloc"),
    ("DISTCONV_TRANSPORT", "pigeon", "host, cuda-aware, nccl or torch"),
]


@pytest.mark.parametrize(("name", "text", "values"), BAD)
def test_a_bad_value_is_told_with_what_the_variable_takes(name, text, values):
    with pytest.raises(dc.EnvironmentVariableError, match=re.escape(f"{name}='{text}' must be {values}; default: ")):
        check(MPI.COMM_SELF, {name: text})
    assert issubclass(dc.EnvironmentVariableError, ValueError)


@pytest.mark.ranks(at_least=2)
def test_a_bad_value_on_one_rank_is_the_same_error_on_all(comm):
    own = {"DISTCONV_CHECK": "sometimes"} if comm.rank == 1 else {}
    match = r"DISTCONV_CHECK='sometimes' must be off, plan or all; default: plan \(on rank 1\)"
    raises_everywhere(comm, dc.EnvironmentVariableError, match, lambda: check(comm, own))


@pytest.mark.fault(103)
@pytest.mark.ranks(at_least=2)
def test_a_value_that_differs_between_ranks_is_the_same_error_on_all(comm):
    own = {"DISTCONV_FALLBACK": "error"} if comm.rank == 1 else {"DISTCONV_CHECK": ""}
    match = "DISTCONV_FALLBACK differs between ranks: not set on rank 0, error on rank 1. Export"
    raises_everywhere(comm, dc.EnvironmentVariableError, match, lambda: check(comm, own))
    check(comm, {"DISTCONV_FALLBACK": "error"})


def test_the_page_has_a_section_for_each_variable_with_its_values_and_default():
    text = (ROOT / "docs" / "reference" / "variables.md").read_text()
    sections = dict(re.findall(r"^## (DISTCONV_\w+)\n\n(.*?)(?=^## )", text, re.M | re.S))
    assert list(sections) == [variable.name for variable in VARIABLES]
    for variable in VARIABLES:
        section = sections[variable.name]
        for word in re.findall(r"[\w-]+", variable.values):
            assert word in ("or", "from", "on") or word.lower() in section.lower(), (variable.name, word)
        if " " not in variable.default:
            assert f"`{variable.default}` (default)" in section or f"default {variable.default}" in section


def test_no_other_module_reads_a_variable_of_ours():
    folders = ("distconv", "jobs", "kernels", "layers", "perfmodel", "pipeline")
    sources = {path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    reading = re.compile(r"(environ|getenv).*DISTCONV_")
    assert sources - {Path(environment.__file__).resolve()}
    assert not [path for path in sources if reading.search(path.read_text())]


def test_info_shows_what_is_in_force(monkeypatch, capsys):
    monkeypatch.setenv("DISTCONV_MALLOC", "1")
    monkeypatch.delenv("DISTCONV_CHECK", raising=False)
    assert cli.main(["info"]) == 0
    lines = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in capsys.readouterr().out.splitlines()}
    assert lines["DISTCONV_MALLOC"] == "1" and lines["allocator"] == allocator.describe()
    assert lines["DISTCONV_CHECK"] == "not set: plan"
    assert {v.name for v in VARIABLES} <= set(lines) and "DISTCONV_MALLOC" in os.environ
