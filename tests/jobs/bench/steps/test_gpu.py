"""``distconv bench gpu``: its tables and figures, on a CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from distconv import cli
from distconv.jobs.bench.steps import gpu
from tests.jobs.bench import command
from tests.jobs.command_lines import parsed

printing = command.printing

TINY = "--device cpu --model lenet5 --input 1,28,28 --batch 2 --channels 3 --rounds 3".split()
ALONE = ["plain torch", "distconv, one rank", "the same, captured"]
SPLIT = ["local work alone", "convolution by MPI, host memory", "exchange alone by MPI, host memory"]


@pytest.mark.ranks(1, 2)
def test_one_rank_is_timed_against_torch_and_several_against_their_parts(
    comm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "gpu", *TINY]) == 0
    lines = capsys.readouterr().out.splitlines()
    if comm.rank:
        assert lines == []
        return
    medians = json.loads(lines[-1])["median_s"]
    assert list(medians) == ALONE + (SPLIT if comm.size > 1 else [])
    assert all(value > 0 for value in medians.values())
    found = [line for line in lines if "of the exchange is hidden" in line]
    if comm.size == 1:
        assert found == []
        return
    work, whole, exchange = (medians[name] for name in SPLIT)
    share = min(1.0, (work + exchange - whole) / exchange)
    assert found == [f"2 ranks, MPI, host memory: {share:.0%} of the exchange is hidden"]


def test_the_printed_text_is_as_approved(printing: command.Printing) -> None:
    printing.approve("gpu", gpu, "gpu", *TINY)
    parts = {name: [0.001 * number] for number, name in enumerate(SPLIT, 2)}
    nccl = {"convolution by NCCL": [0.002], "exchange alone by NCCL": [0.001]}
    gpu._print(parsed("bench gpu", *TINY), 4, {"plain torch": [0.001, 0.003]}, parts | nccl)
    printing.approve_printed("gpu-overlap")
