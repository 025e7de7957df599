"""The table of docs/evidence/memory.md: ``python -m tests.jobs.bench.steps.memory_table``.

Each network is measured by ``distconv bench memory`` over four ranks, and so on one.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from pathlib import Path

OWN = "tests.jobs.bench.steps.memory_networks:"

RUNS = f"""
{OWN}own --input 4,640,640 --optimizer adamw --grid h=4
{OWN}own --input 4,320,320 --optimizer adamw --grid h=4
{OWN}own64 --input 4,256,256 --optimizer adamw --grid h=4
mesh1k --size 512 --optimizer momentum --grid h=4
resnet50 --input 3,224,224 --batch 4 --optimizer momentum --grid n=4
vgg16_bn --size 32 --batch 32 --optimizer adam --grid n=4
unet --size 384 --optimizer adam --grid h=2,w=2
unet3d --input 1,64,64,64 --optimizer adam --grid d=2,h=2
{OWN}transformer --input 3,192,192 --classes 10 --batch 4 --optimizer adamw --grid n=4
{OWN}monai_unet --input 4,384,384 --optimizer adamw --grid h=4
{OWN}monai_unet3d --input 1,64,64,64 --optimizer adamw --grid h=4
{OWN}vnet --input 1,48,48,48 --optimizer adamw --grid h=4
held out
{OWN}segresnet --input 1,64,64,64 --optimizer adamw --grid h=4
{OWN}densenet --input 3,224,224 --batch 4 --optimizer adam --grid n=4
{OWN}convnext --input 3,256,256 --batch 4 --optimizer adamw --grid n=4
unet --size 512 --width 48 --optimizer sgd --grid h=4
unet3d --input 1,48,48,96 --optimizer momentum --grid w=4
""".strip().splitlines()


def main() -> None:
    """Measure and print."""
    ratios: list[float] = []
    print("| network, samples, optimizer | ranks | measured | tensors | predicted | measured / predicted |")
    print("|---|---|---|---|---|---|")
    for run in RUNS:
        if run == "held out":
            _sum_up(ratios)
            ratios = []
            continue
        ratios += _rows(run)
    _sum_up(ratios)


def _rows(run: str) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.json"
        words = ["distconv", "bench", "memory", "--json", str(path), "--model", *run.split()]
        ended = subprocess.run(["mpiexec", "-n", "4", *words], capture_output=True, text=True, timeout=600)
        if ended.returncode:
            print(f"| {run} | failed: {ended.stderr.strip().splitlines()[-1]} |", flush=True)
            return []
        figures = json.loads(path.read_text())
    ratios = []
    worst = max(rank["peak"] for rank in figures["ranks"])
    rows = (("1", figures["alone"]["peak"], "predicted_alone"), (f"4 {figures['grid']}", worst, "predicted"))
    for ranks, peak, key in rows:
        total, tensors = sum(figures[key].values()), figures[key]["tensors"]
        ratios.append(peak / total)
        megabytes = " | ".join(f"{value / 2**20:.0f}" for value in (peak, tensors, total))
        print(f"| {run.removeprefix(OWN).split(' --grid')[0]} | {ranks} | {megabytes} | {ratios[-1]:.2f} |", flush=True)
    return ratios


def _sum_up(ratios: list[float]) -> None:
    near = sum(0.9 <= ratio <= 1.1 for ratio in ratios)
    print(f"\nmedian {statistics.median(ratios):.2f}, {near} of {len(ratios)} within 0.9 and 1.1,", end=" ")
    print(f"from {min(ratios):.2f} to {max(ratios):.2f}\n")


if __name__ == "__main__":
    main()
