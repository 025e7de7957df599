"""Compare the training steps of pipeline plan files, interleaved in one run; the first file is the reference.

Steps train on random samples. Those of an asynchronous schedule are measured while the pipeline is full. With
``--devices``, the ranks run the stages that are for their device types.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch
from mpi4py import MPI
from torch.nn import functional

from distconv.errors import DistconvError
from distconv.jobs.bench import report
from distconv.jobs.planning.measured_steps import WARM_UP, pipeline_step_s
from distconv.jobs.planning.options import build_network, sample_shape
from distconv.jobs.training.options import positive_int
from distconv.jobs.training.pipelines.options import add_devices_argument
from distconv.pipeline import Pipeline, PipelinePlan
from distconv.pipeline.runtime.device_kinds import kind_of_rank

EXAMPLES = """\
examples:
  mpiexec -n 2 distconv bench plans pipeline.json --input 3,32,32
  mpiexec -n 2 distconv bench plans equal.json mixed.json --input 3,32,32 --devices old:1,new:1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv bench plans``."""
    parser.add_argument(
        "plans",
        nargs="+",
        type=Path,
        metavar="PLAN.json",
        help="plan files that distconv explore has written for one model",
    )
    parser.add_argument(
        "--input", type=sample_shape, required=True, metavar="C,H,W", help="shape of one sample, channels first"
    )
    parser.add_argument(
        "--classes", type=positive_int, default=10, help="classes that the model predicts (default: %(default)s)"
    )
    parser.add_argument("--width", type=positive_int, help="channels of the model (default: the model's own)")
    add_devices_argument(parser, "device type of each rank, for plans with several")
    parser.add_argument(
        "--rounds", type=positive_int, default=9, help="interleaved repetitions of each plan (default: %(default)s)"
    )
    report.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print. Collective over MPI.COMM_WORLD.

    Raises
    ------
    DistconvError
        If the plans are of different models or mini-batches, or for other ranks.
    """
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    plans = {str(path): PipelinePlan.load(path, comm) for path in options.plans}
    models = sorted({(plan.model, plan.batch) for plan in plans.values()})
    if len(models) > 1:
        raise DistconvError(
            f"the plans are for different models or mini-batches ({models}). Compare plans of one model and mini-batch."
        )
    kind = None if options.devices is None else kind_of_rank(options.devices, comm, torch.device("cpu"))
    times = _measured(options, plans, comm, kind)
    if comm.rank == 0:
        print(_report(options, plans, times))
        report.print_json({"times_s": times}, options.json)
    return 0


def _measured(
    options: argparse.Namespace, plans: dict[str, PipelinePlan], comm: MPI.Intracomm, kind: str | None
) -> dict[str, list[float]]:
    """Return the seconds of ``options.rounds`` steps of each plan, interleaved. Collective."""
    model, batch = next((plan.model, plan.batch) for plan in plans.values())
    network = argparse.Namespace(**vars(options) | {"model": model})
    torch.manual_seed(0)
    x, target = torch.randn(batch, *options.input), torch.randint(options.classes, (batch,))
    optimizer = partial(torch.optim.SGD, lr=1e-6, momentum=0.9)
    pipes = {
        path: Pipeline.from_plan(
            plan, build_network(network), comm, functional.cross_entropy, optimizer, example=x[:2], kind=kind
        )
        for path, plan in plans.items()
    }
    times: dict[str, list[float]] = {path: [] for path in plans}
    for number in range(WARM_UP + options.rounds):
        for path, plan in plans.items():
            seconds = pipeline_step_s(pipes[path], plan.schedule, x, target, comm)
            if number >= WARM_UP:
                times[path].append(seconds)
    for pipe in pipes.values():
        pipe.close()
    return times


def _report(options: argparse.Namespace, plans: dict[str, PipelinePlan], times: dict[str, list[float]]) -> str:
    first = next(iter(plans))
    models = plans[first]
    title = f"training step, float32, {models.model}, {models.batch} samples of {'x'.join(map(str, options.input))}"
    lines = [report.heading(title), report.table_head()]
    for path, values in times.items():
        # Ratios of the same round: the machine's speed drifts between rounds.
        ratio = statistics.median(a / b for a, b in zip(values, times[first], strict=True))
        lines.append(f"{report.time_row(Path(path).stem, values)}  {ratio:6.3f} of {Path(first).stem}")
    for path, plan in plans.items():
        words = [plan.schedule, f"cut at {', '.join(plan.cuts) or 'nothing'}", f"replicas {list(plan.replicas)}"]
        words += [f"on {', '.join(plan.kinds)}"] if plan.kinds else []
        lines.append(f"{path}: {'; '.join(words)}")
    return "\n".join(lines)
