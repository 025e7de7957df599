"""``distconv bench gpu``: the printed text, on a CPU."""

from __future__ import annotations

from distconv.jobs.bench.steps import gpu
from tests.jobs.bench import command
from tests.jobs.command_lines import parsed

printing = command.printing

TINY = "--device cpu --model lenet5 --input 1,28,28 --batch 2 --channels 3 --rounds 3".split()
SPLIT = ["local work alone", "convolution by MPI, host memory", "exchange alone by MPI, host memory"]


def test_the_printed_text_is_as_approved(printing: command.Printing) -> None:
    printing.approve("gpu", gpu, "gpu", *TINY, "--no-compile", "--bfloat16", "--memory-format", "channels_last")
    parts = {name: [0.001 * number] for number, name in enumerate(SPLIT, 2)}
    nccl = {"convolution by NCCL": [0.002], "exchange alone by NCCL": [0.001]}
    gpu._print(
        parsed("bench gpu", *TINY),
        4,
        {"torch, contiguous": [0.004], "torch, channels_last": [0.001, 0.003]},
        parts | nccl,
    )
    printing.approve_printed("gpu-overlap")
