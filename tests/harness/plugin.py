"""The pytest plugin of one rank: chooses its tests, limits their time, and compares outcomes with other ranks.

A plain ``pytest`` runs everything on one rank. Under mpiexec, tests that use the fixture ``comm`` run, on the rank
counts that their marker ``ranks`` names.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TextIO

import pytest
from hypothesis import HealthCheck, settings

from tests.harness import launch, selection
from tests.harness.records import Record, Writer, rank_path
from tests.harness.watchdog import Watchdog

DEFAULT_LIMIT_S = 60.0
EXEMPT = ("needs ../shared/data", "needs the package")
"""Reasons for which a test may be skipped at every rank count: what it needs is not part of the test extra."""

# All ranks draw the same examples. No deadline and no check that looks at the clock: ranks would part ways.
settings.register_profile(
    "ranks",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("distconv")
    group.addoption("--only", choices=["serial", "ranks"], help="tests that use no `comm`, or those that do")
    group.addoption("--results", type=Path, help="folder for this rank's result file")
    group.addoption("--done", type=Path, help="file that names tests to leave out, one a line")
    group.addoption("--part", help="I-of-N: the tests of every N-th file, from the I-th on")
    group.addoption("--device", help="where tensors and modules are made that name no device, e.g. cuda")
    group.addoption("--share", choices=["short", "rest", "full"], help="each case on one rank count; which of them")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("ranks")
    if config.getoption("--device"):
        _make_everything_on(config.getoption("--device"))
    # Output is not captured here, so this is the real stderr; a test's own may be captured when the watchdog speaks.
    stderr = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
    config.pluginmanager.register(RankSession(config, stderr), "distconv-rank-session")


@pytest.fixture
def comm() -> Any:
    """A duplicate of MPI.COMM_WORLD, the same one for all tests (until one fails)."""
    return world().comm


@pytest.fixture(autouse=True)
def rules_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without a distributed rule raises: what a test takes for a rule must not be the fallback."""
    gathered_call = sys.modules.get("distconv.layers.common.gathered_call")
    if gathered_call is not None:
        monkeypatch.setattr(gathered_call, "level", "error")


@pytest.fixture(autouse=True)
def in_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 3 ranks convolutions take every block in pieces, as they do large ones; on other counts as users have it."""
    convolution = sys.modules.get("distconv.kernels.convolution")
    if convolution is not None and "comm" in request.fixturenames and request.getfixturevalue("comm").size == 3:
        for limit in ("OVERLAP_THRESHOLD", "OVERLAP_THRESHOLD_ON_GPU"):
            monkeypatch.setattr(convolution, limit, -1)


@pytest.fixture
def fallback(rules_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without a rule computes the whole and warns, as users have it; each test is warned anew."""
    from distconv.layers.common import call_site, gathered_call

    monkeypatch.setattr(gathered_call, "level", "warn")
    call_site.clear_warned_sites()


@pytest.fixture
def shared_tmp_path(tmp_path: Path, comm: Any) -> Path:
    """One empty folder, the same on all ranks; ``tmp_path`` is another on each."""
    return Path(comm.bcast(str(tmp_path)))


@pytest.fixture
def mpiexec() -> Callable[..., Any]:
    """``mpiexec(ranks, code_or_path, *arguments, timeout=20, env=None)``: a job of its own, for tests of faults."""
    return launch.mpiexec


@functools.cache
def world() -> Any:
    """The ranks of this job; starts MPI."""
    from tests.harness.agreement import World

    return World()


class RankSession:
    """One rank's part of a test run."""

    def __init__(self, config: pytest.Config, stderr: TextIO) -> None:
        self.stderr = stderr
        self.rank = launch.launched_rank()
        self.in_job = self.rank is not None
        self.only = config.getoption("--only") or ("ranks" if self.in_job and world().size > 1 else None)
        self.has_one_rank = self.only == "serial" and config.getoption("--share") is not None
        """True if this process, started without mpiexec, also runs the tests for one rank."""
        self.part = config.getoption("--part")
        folder = config.getoption("--results")
        self.judged_by_files = folder is not None
        self.writer = Writer(rank_path(folder, self.rank or 0) if folder else None)
        done = config.getoption("--done")
        self.elsewhere = config.getoption("--device") not in (None, "cpu")
        self.done = set(done.read_text().splitlines()) if done else set()
        self.watchdog = Watchdog(self._over_limit, stderr)
        self.current = ""
        self.reports: list[pytest.TestReport] = []

    # 1. Choosing.

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        if collection_path.suffix != ".py":
            return None
        elsewhere = not self._in_part(collection_path)
        ranks = world().size if self.in_job and config.getoption("--share") else None
        return elsewhere or (self.only == "ranks" and not selection.for_ranks(collection_path, ranks)) or None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        wanted, which = items, config.getoption("--share")
        if which:
            ranks = world().size if self.in_job else 0
            wanted = selection.share(items, ranks, which)
            for item in selection.share(items, ranks, "short") if which == "rest" else ():
                self.writer.record(Record(item.nodeid, "elsewhere", exempt=True))
        chosen = [item for item in wanted if self._chosen(item)]
        kept = set(chosen)
        left_out = [item for item in items if item not in kept]
        items[:] = chosen
        config.hook.pytest_deselected(items=left_out)
        if self.in_job and not world().same(hashlib.sha256("\n".join(i.nodeid for i in items).encode()).digest()):
            self._say("the ranks collected different tests or another order (parameters drawn from a set?)")
            time.sleep(1.0)
            world().abort(1)

    def _in_part(self, path: Path) -> bool:
        """Return True if the tests of a file belong to the part of the run that this process has."""
        return self.part is None or selection.in_part(path, *map(int, self.part.split("-of-")))

    def _chosen(self, item: pytest.Item) -> bool:
        if not self._in_part(item.path):  # pytest collects files that are named on the command line without asking
            return False
        mark, on_ranks = item.get_closest_marker("ranks"), selection.is_on_ranks(item)
        assert not on_ranks or selection.for_ranks(item.path), f"{item.nodeid}: see FOR_RANKS in selection.py"
        if on_ranks or "mpiexec" in getattr(item, "fixturenames", ()):
            item.add_marker("mpi")
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if item.get_closest_marker("cpu") and self.elsewhere:
            return False
        if item.nodeid in self.done or (self.only and on_ranks != (self.only == "ranks") and not self.has_one_rank):
            return False
        if mark is None or selection.runs_on(mark, world().size if self.in_job else 1):
            return True
        self.writer.record(Record(item.nodeid, "elsewhere"))
        return False

    # 2. Running.

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        mark = item.get_closest_marker("time_limit")
        self.current, self.reports = item.nodeid, []
        self.writer.begin(item.nodeid)
        started = time.monotonic()
        _compare_examples(item, self)
        with self.watchdog.guard(mark.args[0] if mark else DEFAULT_LIMIT_S):
            result = yield
            record = self._record(item, time.monotonic() - started)
            self.writer.record(record)
            self._settle(record.outcome, record.text)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self.reports.append(report)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.writer.record(Record(report.nodeid or "collection", "failed", text=report.longreprtext))
        elif report.skipped:
            self.writer.record(_skip(report.nodeid, report.longrepr))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.writer.end()
        if self.in_job:
            world().barrier()  # mpiexec kills all ranks at the first that ends with an error
        if self.judged_by_files:
            session.exitstatus = 0

    def _record(self, item: pytest.Item, time_s: float) -> Record:
        failed = [report for report in self.reports if report.failed]
        if failed or not self.reports:
            text = "\n".join(part for report in failed for part in _texts(report))
            return Record(item.nodeid, "failed", time_s, text)
        skipped = [report for report in self.reports if report.skipped and not hasattr(report, "wasxfail")]
        if not skipped:
            return Record(item.nodeid, "passed", time_s)
        record = _skip(item.nodeid, skipped[0].longrepr)
        record.exempt |= item.get_closest_marker("gpu") is not None
        return record

    # 3. Comparing.

    def settle_example(self, error: BaseException | None) -> None:
        """Compare the outcome of one drawn example, so that ranks part ways at once and not in the next one."""
        text = "".join(traceback.format_exception(error)) if error else ""
        self._settle("failed" if error else "passed", text, example=True)

    def _settle(self, outcome: str, text: str, example: bool = False) -> None:
        """Return if all ranks have the same outcome, else end the job."""
        if not self.in_job:
            return
        outcomes = world().outcomes(outcome)
        if outcomes is None:
            self._end_job(text, "failed here, and the other ranks are still in this test", example)
        elif len(set(outcomes)) > 1:
            told = ", ".join(f"rank {rank}: {theirs}" for rank, theirs in enumerate(outcomes))
            worst = max(outcomes, key=["passed", "skipped", "failed"].index)
            if outcomes.index(worst) != world().rank:
                time.sleep(10.0)  # the first rank with the worst outcome speaks and ends the job
            self._end_job(text, f"the ranks differ ({told})", example)
        elif outcome == "failed" and not example:
            world().renew()

    def _end_job(self, text: str, why: str, example: bool) -> None:
        from tests.harness.agreement import LONE_FAILURE

        self.writer.record(Record(self.current, "failed", text=f"{why}\n{text}"))
        self._say(f"{why}; the job ends\n{text}")
        world().abort(LONE_FAILURE)

    def _over_limit(self, stacks: str, limit_s: float) -> None:
        from tests.harness.agreement import TIME_LIMIT

        why = f"still running after {limit_s:g} s"
        self.writer.record(Record(self.current, "failed", limit_s, f"{why}\n{stacks}"))
        self._say(f"{why}\n{stacks}")
        if self.in_job:
            time.sleep(2.0)  # the others reach their limit now too, and their stacks are wanted
            world().abort(TIME_LIMIT)
        os._exit(TIME_LIMIT)

    def _say(self, text: str) -> None:
        who = f"rank {self.rank}: " if self.in_job else ""
        self.stderr.write(f"\n{who}{self.current}: {text}\n")
        self.stderr.flush()


def _compare_examples(item: pytest.Item, session: RankSession) -> None:
    """Make a hypothesis test on ranks compare the ranks' outcomes after each example."""
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    if handle is None or not session.in_job or hasattr(handle.inner_test, "compared"):
        return
    from hypothesis.errors import UnsatisfiedAssumption

    inner = handle.inner_test

    @functools.wraps(inner)
    def compared(*args: Any, **kwargs: Any) -> None:
        try:
            inner(*args, **kwargs)
        except UnsatisfiedAssumption:
            raise
        except Exception as error:
            session.settle_example(error)
            raise
        session.settle_example(None)

    compared.compared = True  # type: ignore[attr-defined]
    handle.inner_test = compared


def _make_everything_on(name: str) -> None:
    import torch

    from tests.harness.device import OnDevice

    torch.backends.cudnn.deterministic = True  # what one process computes twice is to be the same
    torch.autograd.set_multithreading_enabled(False)  # what follows holds for this thread
    count = torch.accelerator.device_count()
    OnDevice(torch.device(name, (launch.launched_rank() or 0) % count) if count else torch.device(name)).__enter__()


def _texts(report: pytest.TestReport) -> Sequence[str]:
    return [report.longreprtext, *(f"--- {name}\n{text}" for name, text in report.sections)]


def _skip(test: str, longrepr: object) -> Record:
    reason = str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
    return Record(test, "skipped", text=reason, exempt=any(text in reason for text in EXEMPT))


@functools.cache
def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())
