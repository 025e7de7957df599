"""Compare pipelined training steps with one process and with torch's pipelines, interleaved in one run.

All ranks run one thread. References are the full model on one rank while the others sleep, PyTorch's 1F1B
(torch.distributed.pipelining) and DistributedDataParallel, both over gloo on the same ranks. The ideal time of a
schedule is its simulation with the measured times of its passes. The difference is spent in messages, waiting and
bookkeeping.

Source of the speed-up of hybrid training: stale weights, 6.5, tables 5 and 6, where half of the epochs are pipelined.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from distconv.errors import DistconvError
from distconv.jobs.bench import report
from distconv.jobs.planning.options import run_on_rank_0
from distconv.jobs.timing import Variant, idle, time_interleaved, timed_variants
from distconv.jobs.training.model_factory import build_classifier
from distconv.jobs.training.options import positive_int
from distconv.jobs.training.pipelines.options import counts
from distconv.jobs.training.pipelines.stages import choose_split_points
from distconv.layers.models import MODELS
from distconv.perfmodel.profiles.layer_timing import time_layers
from distconv.pipeline import Kind, Pipeline, Timeline, simulate, split

Cuts = Sequence[str] | Sequence[int]

SAMPLE, CLASSES = (3, 32, 32), 10
NETWORKS = tuple(name for name, model in MODELS.items() if model.sample == SAMPLE)
WARM_UP, ITERATIONS = 5, 20
"""Numbers of steps of the measurement that balances the stages."""

EXAMPLES = """\
examples:
  mpiexec -n 2 distconv bench pipeline
  mpiexec -n 4 distconv bench pipeline --model resnet20 --batch 128 --microbatches 16
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv bench pipeline``."""
    parser.add_argument("--model", choices=NETWORKS, default="vgg16_bn", help="network (default: %(default)s)")
    parser.add_argument("--width", type=positive_int, help="channels of the first layer (default: the model's own)")
    parser.add_argument("--batch", type=positive_int, default=64, help="samples per mini-batch (default: %(default)s)")
    parser.add_argument(
        "--microbatches", type=positive_int, default=8, help="micro-batches per mini-batch (default: %(default)s)"
    )
    parser.add_argument(
        "--ppv",
        type=counts,
        metavar="K,K",
        help="split points: split the model after these convolution and linear layers, counted from 1 (default: "
        "balanced by measured times)",
    )
    parser.add_argument(
        "--rounds",
        type=positive_int,
        default=5,
        help="interleaved repetitions of each variant, whose medians are compared (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=positive_int, default=4, help="training steps per repetition (default: %(default)s)"
    )
    report.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print. Collective over MPI.COMM_WORLD.

    Raises
    ------
    DistconvError
        If there is one rank only.
    """
    world = MPI.COMM_WORLD
    if world.size < 2:
        raise DistconvError("needs one rank for each stage, at least 2. Start it with mpiexec -n 2.")
    torch.set_num_threads(1)
    cuts = _cuts(world, options)
    _init_process_group(world)
    bench = _Bench(world, options, *cuts)
    times = bench.measure()
    traces = bench.traces()
    if world.rank == 0:
        text, figures = _report(options, cuts, times, traces)
        print(text)
        report.print_json(figures, options.json)
    bench.close()
    dist.destroy_process_group()
    return 0


def _cuts(world: MPI.Intracomm, options: argparse.Namespace) -> tuple[Cuts, Cuts]:
    """Return the split points for stages that work on micro-batches, and for stages that work on mini-batches."""
    if not options.ppv:
        micro = max(1, options.batch // options.microbatches)
        return _balanced(world, options, micro), _balanced(world, options, options.batch)
    cuts: Cuts = options.ppv
    if len(cuts) != world.size - 1:
        written = ",".join(map(str, cuts))
        raise DistconvError(
            f"--ppv {written}: {len(cuts)} split points make {len(cuts) + 1} stages, but there are "
            f"{world.size} ranks. Give {world.size - 1} split points."
        )
    return cuts, cuts


def _model(options: argparse.Namespace) -> nn.Module:
    return build_classifier(
        options.model, MPI.COMM_SELF, seed=0, in_channels=SAMPLE[0], classes=CLASSES, width=options.width
    )


def _data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, *SAMPLE, generator=generator)
    return x, torch.randint(CLASSES, (samples,), generator=generator)


def _optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _init_process_group(world: MPI.Intracomm) -> None:
    """Initialize a process group of torch.distributed on the same ranks."""
    file = run_on_rank_0(world, partial(tempfile.mkstemp, prefix="distconv-"))[1]
    dist.init_process_group(
        "gloo", f"file://{file}", rank=world.rank, world_size=world.size, timeout=timedelta(minutes=10)
    )


def _balanced(world: MPI.Intracomm, options: argparse.Namespace, samples: int) -> Cuts:
    """Choose split points for stages of about equal time, measured on rank 0 with this number of samples.

    They are convolutions and linear layers: torch's pipeline rejects a stage that begins with a ReLU in place.
    """

    def measured() -> Cuts:
        model = _model(options)
        profile = time_layers(model, _data(samples)[:1], WARM_UP, ITERATIONS).profile
        modules = dict(model.named_modules())
        starts = [x.name for x in profile.layers if isinstance(modules.get(x.name), (nn.Conv2d, nn.Linear))]
        return choose_split_points(profile, starts, [1] * world.size, type(model).__name__)

    return run_on_rank_0(world, measured)


class _Bench:
    """All variants, each ready to take steps on all ranks. Collective: construct it on every rank."""

    def __init__(self, world: MPI.Intracomm, options: argparse.Namespace, micro: Cuts, whole: Cuts) -> None:
        self.world, self.options, self.micro = world, options, micro
        self.x, self.target = _data(options.batch)
        self.pipes = {
            "1f1b-sno": self._pipe("1f1b-sno", micro, options.microbatches),
            "zero-bubble": self._pipe("zero-bubble", micro, options.microbatches),
            "stale": self._pipe("stale", whole),
            "pipedream": self._pipe("pipedream", whole),
        }
        self.variants: dict[str, Variant] = {
            "1f1b-sno": self._steps_of(self.pipes["1f1b-sno"]),
            "torch 1F1B, gloo": self._torch_pipe(),
            "zero-bubble": self._steps_of(self.pipes["zero-bubble"]),
            "one rank": self._one_rank(),
            "DDP, gloo": self._ddp(),
            "stale": self._steps_of(self.pipes["stale"]),
            "pipedream": self._steps_of(self.pipes["pipedream"]),
        }

    def measure(self) -> dict[str, list[float]]:
        """Measure the seconds per step of every variant, one for each round."""
        return time_interleaved(self.world, self.variants, self.options.rounds, asleep=True)

    def traces(self) -> dict[str, list[Timeline]]:
        """Record the timelines of synchronous schedules, interleaved step by step."""
        traces: dict[str, list[Timeline]] = {"1f1b-sno": [], "zero-bubble": []}
        for _ in range(self.options.rounds * self.options.steps):
            for name, timelines in traces.items():
                with self.pipes[name].traced() as timeline:
                    self.pipes[name].step(self.x, self.target)
                timelines.append(timeline())
        return traces

    def close(self) -> None:
        """Free the MPI resources of the pipelines. Call it on every rank after the last step."""
        for pipe in self.pipes.values():
            pipe.close()
        self.world.Barrier()

    def _pipe(self, schedule: str, cuts: Cuts, microbatches: int = 1) -> Pipeline:
        stages = split(_model(self.options), cuts)
        loss = nn.functional.cross_entropy
        return Pipeline(stages, self.world, schedule, loss, microbatches=microbatches, optimizer=_optimizer)

    def _timed(self, step: Callable[[], object]) -> Variant:
        """Return a function that takes the steps of a round and returns the seconds per step."""
        (turn,) = timed_variants({0: lambda: [step() for _ in range(self.options.steps)]}).values()
        return lambda: turn() / self.options.steps

    def _steps_of(self, pipe: Pipeline) -> Variant:
        return self._timed(lambda: pipe.step(self.x, self.target))

    def _torch_pipe(self) -> Variant:
        stage_module = split(_model(self.options), self.micro)[self.world.rank]
        stage = PipelineStage(stage_module, self.world.rank, self.world.size, torch.device("cpu"))
        schedule = Schedule1F1B(stage, self.options.microbatches, nn.functional.cross_entropy)
        optimizer = _optimizer(list(stage_module.parameters()))
        inputs = [self.x] if self.world.rank == 0 else []
        target = self.target if self.world.rank == self.world.size - 1 else None

        def step() -> None:
            optimizer.zero_grad()
            schedule.step(*inputs, target=target)
            optimizer.step()

        return self._timed(step)

    def _one_rank(self) -> Variant:
        if self.world.rank:
            return idle  # time_interleaved needs every variant on every rank
        return self._timed(_plain_step(_model(self.options), self.x, self.target))

    def _ddp(self) -> Variant:
        model = DistributedDataParallel(_model(self.options))
        # DistributedDataParallel averages the gradients of its ranks, each of which trains its part of the mini-batch.
        x, target = (whole.tensor_split(self.world.size)[self.world.rank] for whole in (self.x, self.target))
        return self._timed(_plain_step(model, x, target))


def _plain_step(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    optimizer = _optimizer(list(model.parameters()))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()

    return step


def _cost(timelines: Sequence[Timeline], kind: Kind, stages: int) -> list[float]:
    """Return the median time of a pass on each stage."""
    spans = [span for timeline in timelines for span in timeline.spans if span.action.kind is kind]
    return [statistics.median(s.end - s.start for s in spans if s.action.stage == stage) for stage in range(stages)]


def _ideal(timelines: Sequence[Timeline], stages: int) -> float:
    """Return the simulated seconds of the schedule with the measured passes, without messages and bookkeeping."""
    forward, backward, update = (_cost(timelines, kind, stages) for kind in (Kind.F, Kind.B, Kind.UPDATE))
    followed = timelines[0].schedule
    weight = _cost(timelines, Kind.W, stages) if followed.splits_backward else None
    return simulate(followed, forward, backward, weight, update=update).makespan


def _report(
    options: argparse.Namespace,
    cuts: tuple[Cuts, Cuts],
    times: dict[str, list[float]],
    traces: dict[str, list[Timeline]],
) -> tuple[str, dict[str, Any]]:
    stages = len(cuts[0]) + 1
    micro, whole_batch = (", ".join(map(str, each)) for each in cuts)
    model = options.model + (f" of width {options.width}" if options.width else "")
    lines = [
        report.heading(
            f"training step, float32, {model}, {options.batch} images of {SAMPLE[1]}x{SAMPLE[2]}, "
            f"{options.microbatches} micro-batches, cut at {micro} (asynchronous: {whole_batch})"
        )
    ]
    references = {"1f1b-sno": "torch 1F1B, gloo", "zero-bubble": "1f1b-sno", "stale": "DDP, gloo"}
    references |= {"pipedream": "DDP, gloo", "torch 1F1B, gloo": "one rank", "DDP, gloo": "one rank"}
    lines.append(report.table_head())
    for name, values in times.items():
        reference = references.get(name)
        # Ratios of the same round: the machine's speed drifts between rounds.
        ratio = [a / b for a, b in zip(values, times[reference], strict=True)] if reference else [1.0]
        lines.append(f"{report.time_row(name, values)}  {statistics.median(ratio):6.3f} of {reference or name}")
    one = times["one rank"]
    for name in ("stale", "pipedream", "DDP, gloo"):
        gains = [a / b for a, b in zip(one, times[name], strict=True)]
        lines.append(f"{name}: {statistics.median(gains):.2f} times as fast as one rank")
    hybrid = statistics.median(2 * a / (a + b) for a, b in zip(one, times["stale"], strict=True))
    lines.append(f"hybrid training, half of the steps stale, half on one rank: {hybrid:.2f} times as fast as one rank")
    for name, timelines in traces.items():
        ideal, taken = _ideal(timelines, stages), statistics.median(each.makespan for each in timelines)
        lines.append(
            f"{name}: {1e3 * taken:.2f} ms a step, its passes alone {1e3 * ideal:.2f} ms by simulation: "
            f"ratio {taken / ideal:.3f}"
        )
    whole = _cost(traces["1f1b-sno"], Kind.B, stages)
    halves = [
        b + w
        for b, w in zip(
            _cost(traces["zero-bubble"], Kind.B, stages), _cost(traces["zero-bubble"], Kind.W, stages), strict=True
        )
    ]
    shares = ", ".join(f"{apart / together:.3f}" for apart, together in zip(halves, whole, strict=True))
    lines.append(f"zero-bubble: B + W relative to a full backward, by stage: {shares}")
    figures = {"times_s": times, "cuts": [micro, whole_batch], "halves_s": halves, "whole_s": whole}
    return "\n".join(lines), figures
