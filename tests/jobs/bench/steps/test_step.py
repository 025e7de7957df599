"""``distconv bench step``: its table and its figures, and what it refuses."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from distconv import cli
from distconv.jobs.bench.steps import step, torch_step
from tests.jobs.bench import command
from tests.jobs.command_lines import assert_refused

printing = command.printing

TINY = [
    "step", "--size", "6", "8", "--channels", "2", "--layers", "1", "--batch", "2", "--rounds", "1", "--steps", "1",
    "--no-compile",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "grid", [[], pytest.param(["--grid", "n=2,h={}"], marks=pytest.mark.slow)], ids=["default", "given"]
)
@pytest.mark.time_limit(180)
def test_every_variant_has_a_median_and_ratios_are_quotients_of_medians(
    comm: Any, capsys: pytest.CaptureFixture[str], grid: list[str]
) -> None:
    given = [word.format(comm.size // 2) for word in grid]
    assert cli.main(["bench", *TINY, *given]) == 0
    lines = capsys.readouterr().out.splitlines()
    if comm.rank:
        assert lines == []
        return
    assert lines[0] == "training step, float32, contiguous, N=2, 1 x (conv 3x3 + ReLU), 2 channels"
    figures = json.loads(lines[-1])
    assert set(figures) == {"command", "machine", "median_s", "moved_bytes"}
    assert list(figures["median_s"]) == ["6", "8"]
    for size, medians in figures["median_s"].items():
        table = lines[lines.index(f"{size} x {size}") + 1 :]
        ours, captured, one, *torchs = medians
        assert [name.split(", ")[2] for name in torchs[:2]] == ["as shipped", "heap"]
        assert {f"{torchs[1]}, channels_last", f"{torchs[-2]}, channels_last"} < set(torchs)
        fastest = min(torchs, key=medians.__getitem__)
        one_thread = min(torchs[-2:], key=medians.__getitem__)
        limit = f"{1e3 * medians[one_thread] / comm.size:.2f} ms"
        assert f"limit: {limit}, the time of {one_thread}, divided by {comm.size} ranks" in table
        assert ours.startswith(f"distconv, {comm.size} ranks x ") and one.startswith("distconv, 1 rank x ")
        assert captured == f"{ours}, captured"
        for name, median in medians.items():
            assert 0 < median < math.inf
            row = next(line for line in table if line.startswith(f"{name} "))
            assert row.split()[-4:] == [*3 * [f"{1e3 * median:.2f}"], f"{median / medians[fastest]:.3f}"]
        for a, b in ((ours, fastest), (captured, fastest), (ours, torchs[0]), (one, one_thread)):
            ratio = f"{medians[a] / medians[b]:.3f}"  # of one turn the smallest and the largest too
            assert f"{a} / {b}: {ratio} (per repetition {ratio} to {ratio})" in table


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.time_limit(180)
def test_attention_sends_keys_values_and_their_gradients_once(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--layer", "attention", "--channels", "4", "--layers", "3"]
    assert cli.main(["bench", *TINY, "--size", "6", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    if comm.rank == 0:
        assert (
            lines[0] == "training step, float32, contiguous, N=2, 3 x (attention over all pixels, 4 heads), 4 channels"
        )
        keys_and_values = 2 * 2 * 6 * 6 * 4 * 4
        assert json.loads(lines[-1])["moved_bytes"]["6"]["messages"] == 3 * 2 * keys_and_values


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "h=3"], "process grid h=3 has 3 parts but the communicator has 2 ranks"),
        (["--grid", "x=2"], "argument --grid: grid 'x=2': 'x=2' is not one axis=parts"),
        (["--rounds", "0"], "argument --rounds: '0' is not a positive integer"),
        (["--steps", "0"], "argument --steps: '0' is not a positive integer"),
        (["--size", "8", "-1"], "argument --size: "),
        (["--channels", "two"], "argument --channels: 'two' is not a positive integer"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    comm: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert_refused(capsys, ["bench", *TINY, *arguments], message)


def test_the_printed_text_is_as_approved(printing: command.Printing, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(words: list[str], *, env: dict[str, str], **options: Any) -> Any:
        assert words[:2] == [sys.executable, torch_step.__file__] and options.pop("text")
        assert options == {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        chosen = {name: value for name, value in env.items() if name in ("KEPT", "LD_PRELOAD", "OMP_NUM_THREADS")}
        chosen |= {name: value for name, value in env.items() if name.startswith("MALLOC_")}
        printing.seen.append(f"start {words[2:]}, {chosen}")
        answers = io.StringIO("[0.003, 0.001, 0.002]\n")
        asked: list[str] = []
        stdin = SimpleNamespace(write=asked.append, flush=lambda: asked.append("flush"))

        def communicate(last: str) -> None:
            printing.seen.append(f"asked {[*asked, last]}")

        return SimpleNamespace(stdin=stdin, stdout=answers, communicate=communicate)

    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("MALLOC_TOP_PAD_", "7")
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.setattr(step.subprocess, "Popen", start)
    monkeypatch.setattr(step.os, "sched_getaffinity", lambda _: range(2))
    monkeypatch.setattr(step.caching_allocators, "find_installed", lambda name: None)
    monkeypatch.setattr(step.allocator, "kind", "heap")
    words = [word for word in TINY if word != "--no-compile"]
    printing.approve(
        "step", step, *words, "--size", "7", "--rounds", "3", "--steps", "3", "--memory-format", "channels_last"
    )
