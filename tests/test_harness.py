"""The harness itself: a failure on one rank, a hang and a silent end are seen, and jobs leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import run as driver
from tests.harness import launch, selection
from tests.harness.selection import runs_on

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.mpi, pytest.mark.time_limit(120)]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run these tests with tests/run.py; returns its exit code and what it printed."""

    def start(code: str, *arguments: str) -> tuple[int, str]:
        path = tmp_path / "test_inner.py"
        path.write_text("import os, pytest\nfrom hypothesis import given, strategies\n" + textwrap.dedent(code))
        command = [sys.executable, str(ROOT / "tests" / "run.py"), *arguments, str(path)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
        return ended.returncode, ended.stdout

    return start


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1]


def test_each_test_runs_where_it_belongs(run) -> None:
    code, output = run(
        """
        def test_alone(): pass
        def test_everywhere(comm): assert comm.allreduce(1) == comm.size
        @pytest.mark.ranks(2)
        def test_on_two(comm): assert comm.size == 2
        @pytest.mark.ranks(lambda size: size == 1)
        def test_on_one(comm): assert comm.size == 1
        def test_folder(comm, shared_tmp_path): assert len(set(comm.allgather(shared_tmp_path))) == 1
        @given(strategies.integers())
        def test_drawn(comm, number): assert len(set(comm.allgather(number))) == 1
        """,
        "--ranks=serial,1,2",
    )
    assert code == 0, output
    assert last_line(output) == "9 passed, 0 failed, 0 skipped"


def test_a_failure_on_one_rank_ends_the_job_and_the_rest_runs_in_another(run) -> None:
    code, output = run(
        """
        def test_alone(comm): assert comm.rank == 0, "only here"
        def test_others_wait(comm):
            assert comm.rank == 1, "others wait"
            comm.Barrier()
        @given(strategies.integers(0, 9))
        def test_example(comm, number): assert comm.rank == 0 or number < 5, "example"
        def test_after(comm): pass
        """,
        "--ranks=2",
    )
    assert code == 1
    assert "rank 1: the ranks differ (rank 0: passed, rank 1: failed)" in output
    assert "AssertionError: only here" in output
    assert "rank 0: failed here, and the other ranks are still in this test" in output
    assert "AssertionError: others wait" in output
    assert "AssertionError: example" in output
    assert last_line(output) == "1 passed, 3 failed, 0 skipped"


def test_a_failure_on_all_ranks_does_not_end_the_job(run) -> None:
    code, output = run("def test_fails(comm): assert not comm\ndef test_after(comm): pass", "--ranks=2")
    assert code == 1
    assert "job 2" not in output
    assert last_line(output) == "1 passed, 1 failed, 0 skipped"


def test_a_hang_ends_at_its_limit_with_the_stacks_of_all_ranks(run) -> None:
    code, output = run(
        """
        @pytest.mark.time_limit(2)
        def test_hangs(comm):
            if comm.rank == 0:
                comm.Barrier()
            else:
                comm.recv(source=0)
        def test_after(comm): pass
        """,
        "--ranks=2",
    )
    assert code == 1
    assert "test_hangs: still running after 2 s" in output
    assert 'test_inner.py", line 7 in test_hangs' in output
    assert 'test_inner.py", line 9 in test_hangs' in output
    assert last_line(output) == "1 passed, 1 failed, 0 skipped"


@pytest.mark.parametrize("where", ["", "comm"])
def test_an_end_without_a_word_is_a_failure(run, where) -> None:
    code, output = run(
        f"def test_ends({where}): os._exit(0)\ndef test_after({where}): pass", f"--ranks={'2' if where else 'serial'}"
    )
    assert code == 1
    assert "ranks without an end to their results: 0" in output
    assert last_line(output) == "1 passed, 1 failed, 0 skipped"


def test_a_module_that_cannot_be_imported_is_a_failure(run) -> None:
    code, output = run("import no_such_module\ndef test_never(comm): pass", "--ranks=1")
    assert code == 1
    assert "No module named 'no_such_module'" in output
    assert last_line(output) == "0 passed, 1 failed, 0 skipped"


def test_ranks_that_collect_different_tests_are_stopped(run) -> None:
    code, output = run(
        """
        from mpi4py import MPI
        @pytest.mark.parametrize("number", [MPI.COMM_WORLD.rank])
        def test_own(comm, number): pass
        """,
        "--ranks=2",
    )
    assert code == 1
    assert "the ranks collected different tests" in output


def test_tests_that_no_rank_count_ran_are_named() -> None:
    from tests.harness.records import Record
    from tests.run import Column, never_run

    one = Column(1, {name: Record(name, "skipped", text="why", exempt=name == "c") for name in "abc"})
    two = Column(2, {"a": Record("a", "passed"), "b": Record("b", "skipped"), "d": Record("d", "elsewhere")})
    assert never_run([one, two]) == ["b (why)", "d (no rank count fits its marker)"]


@pytest.mark.parametrize(
    ("mark", "sizes"),
    [
        (pytest.mark.ranks(2, 4), [2, 4]),
        (pytest.mark.ranks(at_least=3), [3, 4, 6, 8]),
        (pytest.mark.ranks(at_most=2), [1, 2]),
        (pytest.mark.ranks(lambda size: size % 3 == 0), [3, 6]),
    ],
)
def test_the_marker_names_rank_counts(mark, sizes) -> None:
    assert [size for size in (1, 2, 3, 4, 6, 8) if runs_on(mark.mark, size)] == sizes


def test_a_job_returns_code_and_output(mpiexec) -> None:
    code = (
        "import os, sys; from mpi4py import MPI; os.write(1, b'%d %s\\n' % (MPI.COMM_WORLD.rank, sys.argv[1].encode()))"
    )
    ended = mpiexec(2, code, "word")
    assert ended.returncode == 0
    assert sorted(ended.stdout.split("\n")) == ["", "0 word", "1 word"]


def test_a_job_over_its_limit_is_killed_with_all_its_processes_and_shared_memory() -> None:
    code = "from mpi4py import MPI; print('here', flush=True); MPI.COMM_WORLD.rank or MPI.COMM_WORLD.recv(source=1)"
    with launch.Job(2, code) as job:
        begin = time.monotonic()
        while "here" not in job.output() and time.monotonic() - begin < 30:
            time.sleep(0.05)
        segments = set().union(*map(launch.segments_of, job.ranks().values()))
        assert segments
        assert all(path.exists() for path in segments)
        with pytest.raises(launch.JobTimeout, match="still running after 1 s\n--- stdout\nhere"):
            job.wait(1)
        assert time.monotonic() - begin < 40
        assert job.processes() == []
        assert not any(path.exists() for path in segments)


def test_segments_that_a_process_has_open_but_not_mapped_are_seen(tmp_path) -> None:
    path = Path(f"/dev/shm/mpich_shm_test_{os.getpid()}")
    try:
        with path.open("w"):
            assert path in launch.segments_of(os.getpid())
        assert path not in launch.segments_of(os.getpid())
    finally:
        path.unlink()


def test_a_rank_of_a_running_job_can_be_killed() -> None:
    with launch.Job(2, "import time; from mpi4py import MPI; time.sleep(60)") as job:
        while len(job.ranks()) < 2:
            time.sleep(0.05)
        os.kill(job.ranks()[1], signal.SIGKILL)
        assert job.wait(10).returncode != 0
    assert job.processes() == []


class Item:
    """Items for the selection: four cases of each test, ten tests in each file."""

    def __init__(self, number: int, *marks: pytest.MarkDecorator, fixtures: tuple[str, ...] = ("comm",)) -> None:
        self._marks = {each.name: each.mark for each in marks}
        self.path, self.fixturenames = Path(f"test_{number // 40}.py"), fixtures
        self.nodeid = f"{self.path}::test_{number // 4}[{number % 4}]"

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._marks.get(name)


def test_the_short_run_and_the_rest_are_the_full_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "FEW", 3)
    kinds = [(), (), (), (pytest.mark.long,), (pytest.mark.ranks(2, 8),)]
    fixtures = [("comm",), (), ("mpiexec",), ("comm",), ("comm",)]
    items = [Item(number, *kinds[number // 4 % 5], fixtures=fixtures[number // 4 % 5]) for number in range(1200)]
    short = set()
    for ranks in driver.COUNTS:
        chosen = {which: set(selection.share(items, ranks, which)) for which in ("short", "rest", "full")}
        assert chosen["short"] | chosen["rest"] == chosen["full"] and not chosen["short"] & chosen["rest"]
        assert not (chosen["short"] and ranks in selection.MANY)
        short |= chosen["short"]
    for number, item in enumerate(items):
        kind, case = number // 4 % 5, number % 4
        on_ranks, serial = kind in (0, 4) and case in (0, 1, 3), kind == 1  # all cases of serial tests
        assert (item in short) == (on_ranks or serial), item.nodeid


def test_each_case_is_run_on_one_count_that_its_marker_allows_and_most_on_three() -> None:
    few, many = (1, 2, 3, 4), tuple(selection.MANY)
    marks = [(), (pytest.mark.ranks(at_least=4),), (pytest.mark.ranks(at_most=6),), (pytest.mark.ranks(2, 8),)]
    items = [Item(number, *marks[number % 5 % 4]) for number in range(1200)]
    chosen = {ranks: set(map(id, selection.thin(items, ranks))) for ranks in few + many}  # type: ignore[arg-type]
    for item in items:
        counts = [ranks for ranks in few if id(item) in chosen[ranks]]
        mark = item.get_closest_marker("ranks")
        if mark is not None and mark.args:  # type: ignore[attr-defined]
            assert all(id(item) in part for part in chosen.values()), "those that name their counts are left to them"
        else:
            assert len(counts) == 1
            assert mark is None or runs_on(mark, counts[0])  # type: ignore[arg-type]
            firsts = [ranks for ranks in many if id(item) in chosen[ranks]]
            assert len(firsts) <= (item.nodeid.endswith("[0]"))
    unmarked = {id(item) for item in items if item.get_closest_marker("ranks") is None}
    assert 0 < len(chosen[8] & unmarked) < len(chosen[2] & unmarked) < len(chosen[3] & unmarked)
    assert len(chosen[3] & unmarked) > len(unmarked) / 2


def test_on_many_ranks_a_share_of_the_files_is_read_and_those_that_may_name_them(tmp_path: Path) -> None:
    paths = [tmp_path / f"test_{number}.py" for number in range(60)]
    for path in paths:
        path.write_text("def test(comm): ...")
    shares = [{path for path in paths if selection.for_ranks(path, ranks)} for ranks in selection.MANY]
    assert all(shares) and not set.intersection(*shares) and len(set.union(*shares)) < 30
    (other,) = [path for path in paths if path not in set.union(*shares)][:1]
    for text, expected in (("ranks(2, 8)", True), ("ranks(*GRIDS)", True), ("ranks(2, 4)", False)):
        other.write_text(f"@pytest.mark.{text}\ndef test(comm): ...")
        assert selection.for_ranks(other, 8) is expected
        assert selection.for_ranks(other, 3)


def test_folders_and_modules_stand_for_their_tests() -> None:
    tests = ROOT / "tests"
    arguments = ["layers/nn", "jobs/mesh/scores.py", "distconv/layers/nn", "tests/distconv", "-k", "layers"]
    expected = [tests / "layers/nn", tests / "jobs/mesh/test_scores.py", tests / "layers/nn"]
    assert driver.mirrored(arguments) == [*map(str, expected), "tests/distconv", "-k", "layers"]
    assert driver.mirrored(["-k", "layers"]) == ["-k", "layers", str(tests)]
    with pytest.raises(SystemExit, match=r"jobs/__init__\.py: there is no tests/jobs/test___init__\.py"):
        driver.mirrored(["jobs/__init__.py"])


@pytest.mark.parametrize(
    "names", [["tests/test_harness.py"], ["tests/kernels"], ["tests/structure", "tests/test_harness.py"]]
)
def test_each_named_test_file_is_in_one_of_the_parts_that_run(names: list[str]) -> None:
    made = driver.parts(["--share=short", *names])
    files = {file for name in names for file in [*Path(name).rglob("test_*.py"), Path(name)] if file.is_file()}
    indices = [
        {driver.PART_NAMES[i] for i in range(driver.PARTS) if selection.in_part(file, i, driver.PARTS)}
        for file in files
    ]
    assert all(len(each) == 1 for each in indices)
    assert made == sorted(set().union(*indices))


def test_a_file_that_is_named_runs_once(run) -> None:
    code, out = run("def test_a(): pass", "--short", "--ranks=serial")
    assert (code, out.count("1 passed in")) == (0, 1)


def test_a_run_that_is_told_to_end_takes_its_jobs_along(tmp_path: Path) -> None:
    place = tmp_path / "pids"
    path = tmp_path / "test_inner.py"
    path.write_text(
        textwrap.dedent(
            f"""
            import os, time
            def test_that_takes_long(comm):
                with open({str(place)!r}, "a") as file:
                    file.write(f"{{os.getpid()}}\\n")
                time.sleep(60)
            """
        )
    )
    process = subprocess.Popen([sys.executable, str(ROOT / "tests" / "run.py"), "--ranks=2", str(path)])
    deadline = time.monotonic() + 60
    while not place.exists() or len(place.read_text().splitlines()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    deadline = time.monotonic() + 5  # the system takes a moment to clear away what was killed
    while any(Path(f"/proc/{pid}").exists() for pid in place.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
