"""The command ``distconv``: import the module of the requested job only, and run it.

A job module defines ``add_arguments(parser)`` and ``run(options) -> int``, and may define ``EXAMPLES``. Under MPI only
rank 0 prints. Invalid input ends all ranks with exit code 2 and a one-line message.
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
from typing import IO, Any, NoReturn

from mpi4py import MPI

from distconv.errors import BAD_INPUT, DistconvError, PipelineError
from distconv.process import startup

_PIPE_CLOSED = 141
"""Exit code that a shell reports for a command that SIGPIPE ended."""


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Parameters
    ----------
    module : str
        The module of the job.
    summary : str
        One line for the list of commands.
    """

    module: str
    summary: str


COMMANDS: dict[tuple[str, ...], Command] = {
    ("train", "mesh"): Command(
        "distconv.jobs.commands.train_mesh", "train a network to find mesh cells that are about to tangle"
    ),
    ("data", "mesh"): Command(
        "distconv.jobs.commands.make_mesh", "make mesh-tangling samples with the hydrodynamics code"
    ),
    ("data", "pointcloud"): Command(
        "distconv.jobs.commands.make_pointcloud", "make labelled point clouds: shapes, or points of a folder of files"
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
        "distconv.jobs.commands.plan_pointcloud", "choose how ranks split the samples and the space of a sparse network"
    ),
    ("plan",): Command(
        "distconv.jobs.commands.plan", "choose the distribution of each layer for a machine, and write the plan"
    ),
    ("explore",): Command(
        "distconv.jobs.commands.explore",
        "choose the stages, replicas, distributions and schedule of a pipeline, and write them",
    ),
    ("bench", "step"): Command(
        "distconv.jobs.bench.steps.step", "compare the time of a training step with plain torch"
    ),
    ("bench", "halo"): Command("distconv.jobs.bench.messages.halo", "time halo exchanges"),
    ("bench", "redistribute"): Command(
        "distconv.jobs.bench.messages.redistribute", "time the redistribution of a tensor between grids"
    ),
    ("bench", "allreduce"): Command(
        "distconv.jobs.bench.messages.allreduce", "time the all-reduce of a network's gradients"
    ),
    ("bench", "gpu"): Command(
        "distconv.jobs.bench.steps.gpu", "compare a step on a GPU with plain torch, and measure overlap"
    ),
    ("bench", "layer"): Command(
        "distconv.jobs.bench.layers.layer", "measure memory, traffic and time of convolutions over a grid"
    ),
    ("bench", "scaling"): Command(
        "distconv.jobs.bench.steps.scaling", "compare step times at several rank counts with predictions"
    ),
    ("bench", "planner"): Command("distconv.jobs.bench.planner", "compare the exact search with the paper's selector"),
    ("bench", "pipeline"): Command(
        "distconv.jobs.bench.pipeline", "compare pipelined steps with a single process and torch"
    ),
    ("bench", "plans"): Command("distconv.jobs.bench.plans", "compare the steps of pipeline plan files"),
    ("bench", "sparse"): Command(
        "distconv.jobs.bench.layers.sparse", "compare a sparse convolution with the dense one"
    ),
    ("bench", "pointcloud"): Command(
        "distconv.jobs.bench.layers.pointcloud", "compare a sparse network on point clouds with its dense equivalent"
    ),
    ("bench", "scan"): Command("distconv.jobs.bench.layers.scan", "compare backward algorithms of a recurrent layer"),
    ("bench", "safeguards"): Command(
        "distconv.jobs.bench.steps.safeguards", "measure the cost of checks and checkpoints relative to a step"
    ),
    ("bench", "memory"): Command(
        "distconv.jobs.bench.steps.memory", "compare the peak memory per rank with that of one rank"
    ),
    ("checkpoint",): Command(
        "distconv.checkpoint.command", "list, verify and export the checkpoints of a training run"
    ),
    ("run",): Command(
        "distconv.jobs.commands.run_script", "run your own script with an allocator that keeps freed memory"
    ),
    ("simulate",): Command(
        "distconv.jobs.commands.simulate", "compute time and memory of a pipeline schedule, and draw it"
    ),
    ("profile",): Command(
        "distconv.jobs.commands.profile", "measure this machine and the layers of a network for the planner"
    ),
    ("verify", "conformance"): Command(
        "distconv.jobs.verification.conformance.command", "compare every operator on every kind of grid with torch"
    ),
    ("verify", "differential"): Command(
        "distconv.jobs.verification.differential.command", "compare random operators and small networks with torch"
    ),
    ("verify", "exactness"): Command(
        "distconv.jobs.verification.exactness", "compare training over a grid with plain torch, step by step"
    ),
    ("verify", "predictions"): Command(
        "distconv.jobs.verification.predictions", "compare predicted with measured steps on this machine"
    ),
    ("verify", "pipelines"): Command(
        "distconv.jobs.verification.pipelines", "compare predicted with measured steps of pipelines"
    ),
    ("verify", "soak"): Command(
        "distconv.jobs.verification.soak", "kill, starve and damage a training run at random, and compare its result"
    ),
    ("verify", "capture"): Command(
        "distconv.jobs.verification.captures", "compare captured steps with eager ones, bit for bit"
    ),
    ("conformance",): Command("distconv.jobs.verification.conformance.command", "an alias of verify conformance"),
    ("reproduce", "dryden"): Command(
        "distconv.jobs.papers.dryden.command", "predict strong scaling on Lassen (Dryden et al. 2019)"
    ),
    ("reproduce", "bapipe"): Command(
        "distconv.jobs.papers.bapipe.command", "reproduce BaPipe's tables: throughput, largest model, FPGA boards"
    ),
    ("reproduce", "bppsa"): Command(
        "distconv.jobs.papers.bppsa.command", "reproduce BPPSA's tables: sparse Jacobians, FLOP of a scan, training"
    ),
    ("reproduce", "sparsepipe"): Command(
        "distconv.jobs.papers.sparsepipe.command", "reproduce SparsePipe's partitions over mixed GPUs"
    ),
    ("reproduce", "sparsepipe-accuracy"): Command(
        "distconv.jobs.papers.sparsepipe.accuracy", "compare SparsePipe's VGG16-BN with its dense equivalent"
    ),
    ("reproduce", "stale-weights"): Command(
        "distconv.jobs.papers.stale_weights.command", "measure the accuracy of pipelined training with stale weights"
    ),
    ("info",): Command(
        "distconv.jobs.commands.information",
        "print versions, MPI library, ranks, threads, devices, transport, allocator",
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
    """Argument parser that prints on rank 0 only, and errors as one line."""

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if MPI.COMM_WORLD.rank == 0:
            super()._print_message(message, file)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments as argparse does; options of a file (``--config``) exclude each other, too.

        Parameters
        ----------
        args : sequence of str, optional
            Command-line arguments (default: those of the process).
        namespace : argparse.Namespace, optional
            Options that are already parsed.

        Returns
        -------
        tuple
        """
        options, rest = super().parse_known_args(args, namespace)
        for group in self._mutually_exclusive_groups:
            values = {action.dest: action for action in group._group_actions}
            given = [
                action for name, action in values.items() if getattr(options, name, action.default) != action.default
            ]
            if len(given) > 1:
                first, second = (action.option_strings[-1] for action in given[:2])
                self.error(f"argument {second}: not allowed with argument {first}; one of them is in the options file")
        return options, rest

    def error(self, message: str) -> NoReturn:
        """Print a one-line error and exit with the code for invalid input.

        Parameters
        ----------
        message : str
            Description of the invalid input.
        """
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Collective: call on every rank of ``MPI.COMM_WORLD``.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command-line arguments (default: those of the process).

    Returns
    -------
    int
        The exit code.
    """
    try:
        try:
            return _main(arguments)
        finally:
            # Here, where a closed pipe is handled, and not at exit.
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe (``| head``). Python flushes its buffer at exit, which would fail there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED


def _main(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = _match_command(given)
    if given == ["--version"]:
        if MPI.COMM_WORLD.rank == 0:
            print(f"distconv {importlib.import_module('distconv').__version__}")
        return 0
    if words is None:
        return _show_help(given)
    prog = " ".join(("distconv", *words))
    try:
        if words != ("run",):  # there the script's first grid starts distconv, on the ranks that make it
            warnings.showwarning = _show_warning
            startup.start(MPI.COMM_WORLD)
        return _run(prog, COMMANDS[words], given[len(words) :])
    except PipelineError:
        raise  # raised on this rank alone: the excepthook aborts the other ranks
    except DistconvError as error:
        if isinstance(error.__cause__, BrokenPipeError):
            raise error.__cause__ from None
        # Raised on all ranks with the same message: all of them end here.
        if MPI.COMM_WORLD.rank == 0:
            print(f"{prog}: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT


def _run(prog: str, command: Command, arguments: Sequence[str]) -> int:
    job = _import_job(prog, command)
    parser = make_parser(prog, job)
    for option, word in zip(("", *arguments), arguments, strict=False):
        # An empty path would silently be the current directory.
        if prog != "distconv run" and (not word or re.fullmatch(r"--[\w-]+=", word)):
            parser.error(f"argument {word.rstrip('=') or option}: is empty")
    code: int = job.run(parser.parse_args(arguments))
    return code


def make_parser(prog: str, job: ModuleType) -> Parser:
    """Return the parser for the options of a job.

    Parameters
    ----------
    prog : str
        The command, such as ``distconv train mesh``.
    job : module
        The job.

    Returns
    -------
    Parser
    """
    parser = Parser(
        prog=prog,
        description=_strip_markup(job.__doc__ or ""),
        epilog=getattr(job, "EXAMPLES", None),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    job.add_arguments(parser)
    return parser


def _strip_markup(text: str) -> str:
    """Return a docstring without the markup of code and references, for a terminal.

    Examples
    --------
    >>> _strip_markup("``distconv info`` and :func:`main`")
    'distconv info and main'
    """
    return re.sub(r":\w+:`([^`]*)`", r"\1", text).replace("``", "")


def _match_command(given: Sequence[str]) -> tuple[str, ...] | None:
    """Return the words of the first command that ``given`` begins with, or None."""
    # `plan pointcloud` stands before `plan` in COMMANDS, since arguments of the first one begin with both.
    return next((words for words in COMMANDS if tuple(given[: len(words)]) == words), None)


def _show_help(given: Sequence[str]) -> int:
    """Print the help for all commands or a group of them, or exit with an error for an unknown command."""
    groups = sorted({words[0] for words in COMMANDS})
    group = given[0] if given and given[0] in groups else None
    within = given[1:] if group else given
    asked = not within or within[0] in ("-h", "--help")
    parser = Parser(
        prog="distconv",
        usage="distconv COMMAND [options]\n       distconv --version",
        description="Train convolutional networks whose samples and space are split over MPI ranks.",
        epilog=f"{_list_commands(group)}\n\n{_examples(group)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if asked:
        parser.print_help()
        return 0
    near = " ".join(given[:2] if group else given[:1])
    commands = ", ".join(" ".join(words) for words in COMMANDS if group in (None, words[0]))
    parser.error(f"unknown command {near!r}; the commands are {commands}")


def _list_commands(group: str | None) -> str:
    shown = {" ".join(words): command for words, command in COMMANDS.items() if group in (None, words[0])}
    width = max(map(len, shown))
    return "\n".join(["commands:", *(f"  {name:<{width}}  {command.summary}" for name, command in shown.items())])


def _examples(group: str | None) -> str:
    shown = [line for line in EXAMPLES.splitlines() if group is None or f"distconv {group} " in line]
    return "\n".join(["examples:", *shown])


def _import_job(prog: str, command: Command) -> ModuleType:
    try:
        return importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        if error.name and f"{command.module}.".startswith(f"{error.name}."):
            raise DistconvError(
                "reproduces papers or distconv's own pages, and is not installed. In a checkout of distconv's "
                f"repository run python -m distconv {prog.partition(' ')[2]}"
            ) from error
        raise DistconvError(
            f"{command.module} cannot be loaded: {error}. Reinstall distconv with its dependencies"
        ) from error


def _show_warning(  # noqa: PLR0917 - the signature of warnings.showwarning
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: str | None = None,
) -> None:
    """Print a warning as one line on rank 0, without its location in distconv's source."""
    if MPI.COMM_WORLD.rank == 0:
        print(f"distconv: warning: {message}", file=sys.stderr)
