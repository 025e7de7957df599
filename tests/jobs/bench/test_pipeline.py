"""``distconv bench pipeline``: its report, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.distributed as dist

from distconv import cli
from tests.jobs.command_lines import assert_refused

SMALL = "bench pipeline --width 2 --batch 4 --microbatches 2 --rounds 1 --steps 1"


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.parametrize("ppv", ["--ppv 4", ""], ids=["given", "balanced"])
def test_every_variant_is_timed_and_reported(comm: Any, capsys: pytest.CaptureFixture[str], ppv: str) -> None:
    assert cli.main(f"{SMALL} {ppv}".split()) == 0
    out = capsys.readouterr().out
    assert not dist.is_initialized()
    if comm.rank:
        assert out == ""
        return
    *lines, figures = out.splitlines()
    found = json.loads(figures)
    assert lines[0].startswith("training step, float32, vgg16_bn of width 2, 4 images of 32x32, 2 micro-batches, cut")
    one, stale = (found["times_s"][name][0] for name in ("one rank", "stale"))
    gain = one / (one / 2 + stale / 2)
    assert f"hybrid training, half of the steps stale, half on one rank: {gain:.2f} times as fast as one rank" in lines
    assert {"1f1b-sno", "zero-bubble", "stale", "pipedream", "torch 1F1B, gloo", "DDP, gloo", "one rank"} == {
        *found["times_s"]
    }
    for name, times in found["times_s"].items():
        assert len(times) == 1 and times[0] > 0
        assert any(line.startswith(f"{name} ") and f"{1e3 * times[0]:.2f}" in line for line in lines)
    for name in ("1f1b-sno", "zero-bubble"):
        assert any(line.startswith(f"{name}: ") and "by simulation: ratio" in line for line in lines)
    assert len(found["whole_s"]) == len(found["halves_s"]) == 2
    assert found["cuts"] == ["4", "4"] or not ppv


@pytest.mark.ranks(2)
def test_a_resnet_is_cut_after_a_group(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(f"{SMALL} --model resnet20 --ppv 7".split()) == 0
    out = capsys.readouterr().out
    assert comm.rank or "resnet20 of width 2, 4 images of 32x32, 2 micro-batches, cut at 7 " in out


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("ppv", "message"),
    [
        ("2,x", "argument --ppv: "),
        ("0", "argument --ppv: "),
        ("2,4", "--ppv 2,4: 2 split points make 3 stages, but there are 2 ranks"),
    ],
)
def test_cuts_that_do_not_fit_are_refused_in_a_line(
    comm: Any, capsys: pytest.CaptureFixture[str], ppv: str, message: str
) -> None:
    assert_refused(capsys, [*SMALL.split(), "--ppv", ppv], message)


@pytest.mark.ranks(1)
def test_one_rank_is_refused(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = "distconv bench pipeline: needs one rank for each stage, at least 2. Start it with mpiexec -n 2."
    assert_refused(capsys, SMALL.split(), text)
