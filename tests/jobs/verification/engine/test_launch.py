"""Jobs that a command starts: their number of ranks, what they print, and past a case that hangs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from distconv import cli
from distconv.errors import DistconvError
from distconv.jobs.verification.engine import launch
from distconv.jobs.verification.engine.journal import Journal, Key, Line
from distconv.jobs.verification.engine.verdicts import Verdict
from tests.jobs.command_lines import assert_refused


def test_a_new_job_goes_on_behind_the_case_at_which_one_ended(tmp_path, monkeypatch):
    path, started = tmp_path / "journal", []

    def start(launcher, ranks, arguments):
        started.append(arguments)
        journal = Journal(path)
        journal.begin(Key("calls", ranks, "add", str(len(started))))
        if len(started) == 2:
            journal.end([])
            return 0
        raise DistconvError("the job ended with exit code 75")

    monkeypatch.setattr(launch, "start", start)
    launch.past_hangs("mpiexec", 2, ["verify"], path)
    assert started == [["verify", "--journal", str(path)]] * 2
    (line,) = Journal(path).lines
    assert (line.option, line.ranks, line.verdict) == ("1", 2, Verdict.HANGS)


def test_a_job_is_started_for_each_rank_count_and_fails_if_one_finds_something_wrong(tmp_path, monkeypatch):
    started = []

    def start(launcher, ranks, arguments):
        *words, _, path = arguments
        started.append((launcher, ranks, words))
        journal = Journal(Path(path))
        journal.begin(Key("operators", ranks, "add", ""))
        verdict = Verdict.WRONG if ranks == 3 else Verdict.EXACT
        journal.end([Line("operators", "add", "", "height", "", ranks, verdict)])
        return 0

    monkeypatch.setattr(launch, "start", start)
    for counts, code in ((["1", "2"], 0), (["2", "3"], 1)):
        asked = ["verify", "differential", "--ranks", ",".join(counts), "--seed", "7", "--mpiexec", "m"]
        assert cli.main([*asked, "--only", "operators", "--cases", "5"]) == code
    words = started[0][2]
    assert started == [("m", ranks, words) for ranks in (1, 2, 2, 3)]
    assert words[:2] == ["verify", "differential"] and "--ranks" not in words
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert (given["--seed"], given["--only"], given["--cases"]) == ("7", "operators", "5")


def test_a_job_that_fails_between_cases_is_not_started_again(tmp_path, monkeypatch):
    def start(launcher, ranks, arguments):
        raise DistconvError("exit code 2")

    monkeypatch.setattr(launch, "start", start)
    with pytest.raises(DistconvError, match="exit code 2"):
        launch.past_hangs("mpiexec", 2, [], tmp_path / "journal")


def test_a_command_is_started_with_one_thread_per_rank(monkeypatch, capfd):
    started, codes = [], iter((0, 1, 2))

    def run(command, env):
        started.append((command, {name: env[name] for name in ("OMP_NUM_THREADS", "HOME")}))
        return SimpleNamespace(returncode=next(codes))

    monkeypatch.setattr(launch.subprocess, "run", run)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("HOME", "/home")
    assert launch.start("mpiexec --bind none", 1, ["verify", "x"]) == 0
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch.start("m", 2, []) == 1
    with pytest.raises(DistconvError, match="the job on 2 ranks ended with exit code 2"):
        launch.start("m", 2, [])
    distconv = [sys.executable, "-m", "distconv"]
    assert started[0] == (
        ["mpiexec", "--bind", "none", "-n", "1", *distconv, "verify", "x"], {"OMP_NUM_THREADS": "1", "HOME": "/home"}
    )  # fmt: skip
    assert started[1] == (["m", "-n", "2", *distconv], {"OMP_NUM_THREADS": "3", "HOME": "/home"})
    assert capfd.readouterr().out.splitlines() == ["== 1 rank", "== 2 ranks", "== 2 ranks"]
    monkeypatch.setattr(launch.MPI, "COMM_WORLD", SimpleNamespace(size=2))
    with pytest.raises(DistconvError, match="--ranks starts jobs by itself"):
        launch.start("m", 2, [])


def test_mpiexec_is_that_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert launch.mpiexec() == "mpiexec"
    for folder in ("path", "bin"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpiexec").touch(0o755)
        assert launch.mpiexec() == str(tmp_path / folder / "mpiexec")


def test_cases_that_the_journal_holds_are_not_computed_again(tmp_path):
    def line(family, number, ranks=1):
        return Line(family, "add", str(number), "layout", "", ranks, Verdict.EXACT)

    def case(number):
        return SimpleNamespace(operator="add", option=str(number))

    journal = Journal(tmp_path / "journal")
    for family, number, ranks in (("a", 1, 1), ("other", 1, 1), ("a", 2, 2)):
        journal.begin(Key(family, ranks, "add", str(number)))
        journal.end([line(family, number, ranks)])
    computed, told = [], []

    def lines(family, case):
        assert not all(Journal(tmp_path / "journal").begun.values())  # the case has begun
        computed.append((family, case.option))
        return [line(family, case.option)]

    job = SimpleNamespace(comm=MPI.COMM_SELF, lines=lines)
    groups = [("a", [case(1)]), ("a", [case(1), case(2), case(3)]), ("b", [case(1)])]
    found = launch.run(job, groups, tmp_path / "journal", told.append)
    assert computed == [("a", "2"), ("a", "3"), ("b", "1")]
    assert told == [[line("a", 2), line("a", 3)], [line("b", 1)]]
    assert found == [line("a", 1), line("a", 2), line("a", 3), line("b", 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "0"], "'0' is not a positive integer"),
        (["--ranks", "1,x"], "'x' is not a positive integer"),
        (["--ranks", "1", "--mpiexec", "/nowhere"], "--mpiexec /nowhere: [Errno 2]"),
    ],
)
@pytest.mark.ranks(1)
def test_bad_input_is_one_line(comm, capsys, arguments, message):
    assert_refused(capsys, ["verify", "differential", *arguments], message, among_notes=True)
