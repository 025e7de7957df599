"""The command ``distconv``: finds the job that was asked for, loads that module alone, and runs it.

A job module offers ``add_arguments(parser)`` and ``run(options) -> int``, and ``EXAMPLES`` if it likes. Under MPI only
rank 0 prints; bad input ends all ranks with exit code 2 and one line.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import IO, NoReturn

from mpi4py import MPI

from distconv.errors import BAD_INPUT, DistconvError, PipelineError
from distconv.process import startup

_PIPE_CLOSED = 141
"""What a shell gives for a command that SIGPIPE ended."""


@dataclass(frozen=True)
class Command:
    """Where a subcommand lives and what it does, in a line."""

    module: str
    summary: str


COMMANDS: dict[tuple[str, ...], Command] = {
    ("train", "mesh"): Command(
        "distconv.jobs.commands.train_mesh", "train a network to find mesh cells about to tangle"
    ),
    ("data", "mesh"): Command(
        "distconv.jobs.commands.make_mesh", "make mesh-tangling samples with the hydrodynamics code"
    ),
    ("data", "pointcloud"): Command(
        "distconv.jobs.commands.make_pointcloud", "make labelled point clouds: shapes, or points on OFF meshes"
    ),
    ("train", "classify"): Command("distconv.jobs.commands.train_classify", "train a network to classify images"),
    ("train", "segmentation"): Command(
        "distconv.jobs.commands.train_segmentation", "train a network to segment images or volumes of your own"
    ),
    ("train", "pointcloud"): Command(
        "distconv.jobs.commands.train_pointcloud", "train a sparse network to classify point clouds"
    ),
    ("train", "sequence"): Command(
        "distconv.jobs.commands.train_sequence", "train a recurrent network to classify sequences"
    ),
    ("predict",): Command(
        "distconv.jobs.commands.predict", "predict with a trained network, large samples window by window"
    ),
    ("plan", "pointcloud"): Command(
        "distconv.jobs.commands.plan_pointcloud", "choose how ranks split samples and space of a sparse network"
    ),
    ("plan",): Command(
        "distconv.jobs.commands.plan", "choose each layer's distribution for a machine, and write the plan"
    ),
    ("explore",): Command(
        "distconv.jobs.commands.explore", "choose stages, replicas, distributions and schedule, and write the choice"
    ),
    ("bench", "step"): Command("distconv.jobs.bench.steps.step", "time a training step against plain torch"),
    ("bench", "halo"): Command("distconv.jobs.bench.messages.halo", "time halo exchanges"),
    ("bench", "redistribute"): Command(
        "distconv.jobs.bench.messages.redistribute", "time a tensor's way from one grid to another"
    ),
    ("bench", "allreduce"): Command("distconv.jobs.bench.messages.allreduce", "time the sum of a network's gradients"),
    ("bench", "gpu"): Command("distconv.jobs.bench.steps.gpu", "a step on a GPU against plain torch; what ranks hide"),
    ("bench", "layer"): Command(
        "distconv.jobs.bench.layers.layer", "memory, traffic and time of convolutions over a grid"
    ),
    ("bench", "scaling"): Command(
        "distconv.jobs.bench.steps.scaling", "step times over rank counts against predictions"
    ),
    ("bench", "planner"): Command("distconv.jobs.bench.planner", "the exact search against the paper's selector"),
    ("bench", "pipeline"): Command("distconv.jobs.bench.pipeline", "pipelined steps against one process and torch"),
    ("bench", "plans"): Command("distconv.jobs.bench.plans", "steps of pipeline plan files side by side"),
    ("bench", "sparse"): Command("distconv.jobs.bench.layers.sparse", "a sparse convolution against the dense one"),
    ("bench", "pointcloud"): Command(
        "distconv.jobs.bench.layers.pointcloud", "a sparse network on point clouds against its dense twin"
    ),
    ("bench", "scan"): Command("distconv.jobs.bench.layers.scan", "ways back through time of a recurrent layer"),
    ("bench", "safeguards"): Command(
        "distconv.jobs.bench.steps.safeguards", "what comparing ranks and writing checkpoints cost beside a step"
    ),
    ("bench", "memory"): Command("distconv.jobs.bench.steps.memory", "peak memory per rank against one rank"),
    ("checkpoint",): Command("distconv.checkpoint.command", "list, verify and export what a training has saved"),
    ("run",): Command("distconv.jobs.commands.run_script", "run a script of your own with memory that is kept"),
    ("simulate",): Command("distconv.jobs.commands.simulate", "time, memory and a picture of a pipeline schedule"),
    ("profile",): Command(
        "distconv.jobs.commands.profile", "measure this machine and a network's layers for the planner"
    ),
    ("verify", "conformance"): Command(
        "distconv.jobs.verification.conformance.command", "every operator on every kind of grid against torch"
    ),
    ("verify", "differential"): Command(
        "distconv.jobs.verification.differential.command", "random operators and small networks against torch"
    ),
    ("verify", "exactness"): Command(
        "distconv.jobs.verification.exactness", "training over a grid against plain torch, step by step"
    ),
    ("verify", "predictions"): Command(
        "distconv.jobs.verification.predictions", "predicted against measured steps on this machine"
    ),
    ("verify", "pipelines"): Command(
        "distconv.jobs.verification.pipelines", "predicted against measured steps of pipelines, explored and not"
    ),
    ("verify", "soak"): Command(
        "distconv.jobs.verification.soak", "a training that is killed, starved and damaged at random against itself"
    ),
    ("verify", "capture"): Command(
        "distconv.jobs.verification.captures", "captured steps against eager ones, bit for bit"
    ),
    ("conformance",): Command("distconv.jobs.verification.conformance.command", "the same as verify conformance"),
    ("reproduce", "dryden"): Command(
        "distconv.jobs.papers.dryden.command", "strong scaling on Lassen (Dryden et al. 2019), predicted"
    ),
    ("reproduce", "bapipe"): Command(
        "distconv.jobs.papers.bapipe.command", "BaPipe's tables: throughput, largest model, FPGA boards"
    ),
    ("reproduce", "bppsa"): Command(
        "distconv.jobs.papers.bppsa.command", "BPPSA's tables: sparse Jacobians, FLOP of a scan, training by scan"
    ),
    ("reproduce", "sparsepipe"): Command(
        "distconv.jobs.papers.sparsepipe.command", "SparsePipe's partitions over mixed GPUs"
    ),
    ("reproduce", "sparsepipe-accuracy"): Command(
        "distconv.jobs.papers.sparsepipe.accuracy", "SparsePipe's VGG16-BN against its dense twin, trained alike"
    ),
    ("reproduce", "stale-weights"): Command(
        "distconv.jobs.papers.stale_weights.command", "accuracy of pipelined training with stale weights"
    ),
    ("info",): Command(
        "distconv.jobs.commands.information", "versions, MPI library, ranks, threads, devices, transport, allocator"
    ),
}

EXAMPLES = """\
  distconv data mesh --size 128 --samples 48 --out mesh.h5
  mpiexec -n 4 distconv train mesh --data mesh.h5 --grid n=2,h=2
  mpiexec -n 4 distconv train classify --data digits --model lenet5 --grid n=2,h=2
  distconv train pointcloud
  distconv train sequence
  mpiexec -n 4 distconv predict runs/mesh --data mesh.h5 --out predicted
  distconv plan --model resnet50 --input 3,224,224 --batch 256 --ranks 64 --machine lassen --out plan.json
  mpiexec -n 2 distconv bench step --size 512 --channels 16 --layers 4
  mpiexec -n 4 distconv verify conformance
  distconv verify differential --ranks 1,2,3 --cases 100
  distconv reproduce dryden
  mpiexec -n 4 distconv run train.py
  distconv train mesh --help
"""


class Parser(argparse.ArgumentParser):
    """Prints on rank 0 alone, and an error as one line."""

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if MPI.COMM_WORLD.rank == 0:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """Exit with the code of bad input and one line that says what was wrong."""
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. Collective over MPI.COMM_WORLD."""
    try:
        try:
            return _main(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Who reads has enough (``| head``). What Python still holds must go somewhere when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED


def _main(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = _command_of(given)
    if given == ["--version"]:
        if MPI.COMM_WORLD.rank == 0:
            print(f"distconv {importlib.import_module('distconv').__version__}")
        return 0
    if words is None:
        return _no_command(given)
    prog = " ".join(("distconv", *words))
    try:
        if words != ("run",):  # there the script's first grid starts distconv, on the ranks that make it
            warnings.showwarning = _show_warning
            startup.start(MPI.COMM_WORLD)
        return _run(prog, COMMANDS[words], given[len(words) :])
    except PipelineError:
        raise  # on this rank alone: the excepthook ends the job
    except DistconvError as error:
        if isinstance(error.__cause__, BrokenPipeError):
            raise error.__cause__ from None
        # Raised on all ranks alike: all of them end here.
        if MPI.COMM_WORLD.rank == 0:
            print(f"{prog}: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT


def _run(prog: str, command: Command, arguments: Sequence[str]) -> int:
    job = _job(prog, command)
    parser = parser_of(prog, job)
    for option, word in zip(("", *arguments), arguments, strict=False):
        # An empty path would be the folder where the job happens to run.
        if prog != "distconv run" and (not word or re.fullmatch(r"--[\w-]+=", word)):
            parser.error(f"argument {word.rstrip('=') or option}: is empty")
    code: int = job.run(parser.parse_args(arguments))
    return code


def parser_of(prog: str, job: ModuleType) -> Parser:
    """What reads the options of ``job``."""
    parser = Parser(
        prog=prog,
        description=_unmarked(job.__doc__ or ""),
        epilog=getattr(job, "EXAMPLES", None),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    job.add_arguments(parser)
    return parser


def _unmarked(text: str) -> str:
    """A docstring as a terminal shows it: without the marks of code and of references.

    >>> _unmarked("``distconv info`` and :func:`main`")
    'distconv info and main'
    """
    return re.sub(r":\w+:`([^`]*)`", r"\1", text).replace("``", "")


def _command_of(given: Sequence[str]) -> tuple[str, ...] | None:
    return next((words for words in COMMANDS if tuple(given[: len(words)]) == words), None)


def _no_command(given: Sequence[str]) -> int:
    """Overall help, the list below ``distconv train``, or what is wrong."""
    groups = sorted({words[0] for words in COMMANDS})
    group = given[0] if given and given[0] in groups else None
    within = given[1:] if group else given
    asked = not within or within[0] in ("-h", "--help")
    parser = Parser(
        prog="distconv",
        usage="distconv COMMAND [options]\n       distconv --version",
        description="Train convolutional networks whose samples and space are split over MPI ranks.",
        epilog=f"{_listed(group)}\n\n{_examples(group)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if asked:
        parser.print_help()
        return 0
    near = " ".join(given[:2] if group else given[:1])
    commands = ", ".join(" ".join(words) for words in COMMANDS if group in (None, words[0]))
    parser.error(f"there is no command {near!r}; there are {commands}")


def _listed(group: str | None) -> str:
    shown = {" ".join(words): command for words, command in COMMANDS.items() if group in (None, words[0])}
    width = max(map(len, shown))
    return "\n".join(["commands:", *(f"  {name:<{width}}  {command.summary}" for name, command in shown.items())])


def _examples(group: str | None) -> str:
    shown = [line for line in EXAMPLES.splitlines() if group is None or f"distconv {group} " in line]
    return "\n".join(["examples:", *shown])


def _job(prog: str, command: Command) -> ModuleType:
    try:
        return importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        if error.name and f"{command.module}.".startswith(f"{error.name}."):
            raise DistconvError(_only_in_checkout(prog)) from error
        raise DistconvError(
            f"{command.module} cannot be loaded: {error}; reinstall distconv with what it needs"
        ) from error


def _only_in_checkout(prog: str) -> str:
    """What is said of a command that an installation does not hold."""
    command = prog.partition(" ")[2]
    return (
        "is about papers and distconv's own pages, and not installed: it needs a checkout of distconv's repository; "
        f"there: python -m distconv {command}"
    )


def _show_warning(  # noqa: PLR0917 - the signature of warnings.showwarning
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: str | None = None,
) -> None:
    """A warning as one line, on rank 0 alone: the place in our source says nothing to a user."""
    if MPI.COMM_WORLD.rank == 0:
        print(f"distconv: warning: {message}", file=sys.stderr)
