"""Reproduce BaPipe's evaluation with its closed forms: schedules, throughput, largest model, FPGA boards.

Layer times follow from a roofline of data sheets, so only directions and ratios can be compared with the paper. The
paper's GPUs communicate through Gloo. Its bandwidth over their PCIe is not published, but follows from Table III's two
results for data parallelism of VGG-16 on 4 GPUs (32 and 64 samples each), with an all-reduce that nothing hides. Unless
--link is given, this one bandwidth is fitted to them. The pipelines' results are not used for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

from distconv.jobs.papers.printed_tables import Rows, add_json_argument, print_tables
from distconv.jobs.planning.options import quantity_parser
from distconv.perfmodel.exploration.candidate_stages import PARALLEL
from distconv.perfmodel.exploration.choices import Choice, Exploration
from distconv.perfmodel.exploration.explore import SYNCHRONOUS, explore
from distconv.perfmodel.machine.machine import Link, Machine, Overlap
from distconv.perfmodel.machine.units import Bandwidth
from distconv.perfmodel.stages.partition import partition

from .cuts import cuts_table
from .fpga import table_vi
from .largest_model import table_iv
from .networks import ProfileOf, networks
from .schedules import schedules_table

EXAMPLES = """\
examples:
  distconv reproduce bapipe
  distconv reproduce bapipe --tables III --link 16GB/s
  distconv reproduce bapipe --tables III --neighbours 2GB/s
  distconv reproduce bapipe --tables cuts --json cuts.json
"""

TABLES = ("I-II", "III", "IV", "VI", "cuts")
GPU_BATCH = 64
"""Samples per GPU of the data parallelism that Table III compares with."""

FITTED_GPUS = 4
"""Number of GPUs of the results that the bandwidth is fitted to."""

DP_AT_32 = {4: 0.62, 8: 0.55}
"""Epoch time of VGG-16 with 64 samples per GPU over that with 32, by data parallelism (Table III)."""


@dataclass(frozen=True)
class SpeedupRow:
    """A row of Table III: speedups over data parallelism with 64 samples per GPU.

    The paper has no results for 2 GPUs. These speedups are None. It states no micro-batches for ResNet-50 either: those
    here are assumptions.
    """

    model: str
    gpus: int
    pipedream: float | None
    """Speedup of PipeDream with 64 samples per mini-batch."""
    gpipe: tuple[int, int, float | None]
    """Number of micro-batches, samples of a micro-batch, and speedup."""
    schedule: str
    """Schedule that BaPipe chose."""
    microbatches: int
    """Number of micro-batches that BaPipe chose."""
    size: int
    """Samples of a micro-batch that BaPipe chose."""
    bapipe: float | None


TABLE_III = (
    SpeedupRow("VGG-16", 2, None, (8, 32, None), "1f1b-so", 16, 32, None),
    SpeedupRow("VGG-16", 4, 2.12, (8, 32, 1.95), "1f1b-so", 32, 32, 2.61),
    SpeedupRow("VGG-16", 8, 2.94, (8, 32, 1.77), "1f1b-sno", 64, 64, 2.97),
    SpeedupRow("ResNet-50", 2, None, (4, 64, None), "dp", 2, 64, None),
    SpeedupRow("ResNet-50", 4, 1.0, (4, 64, 1.0), "dp", 4, 64, 1.0),
    SpeedupRow("ResNet-50", 8, 1.0, (8, 64, 1.0), "dp", 8, 64, 1.0),
    SpeedupRow("GNMT-8", 2, None, (8, 64, None), "1f1b-so", 16, 64, None),
    SpeedupRow("GNMT-8", 4, 2.75, (8, 64, 2.93), "1f1b-so", 32, 64, 3.90),
    SpeedupRow("GNMT-8", 8, 2.37, (12, 64, 2.05), "1f1b-so", 64, 64, 3.21),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv reproduce bapipe``."""
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, help="tables to print (default: all)")
    parser.add_argument(
        "--machine",
        default="v100-pcie",
        metavar="NAME|FILE",
        help="machine of Table III, a built-in name or a file (default: %(default)s)",
    )
    bandwidth = quantity_parser(Bandwidth)
    parser.add_argument(
        "--link",
        type=bandwidth,
        metavar="16GB/s",
        help="bandwidth between GPUs (default: fitted to Table III's rows for data parallelism)",
    )
    parser.add_argument(
        "--neighbours",
        type=bandwidth,
        metavar="16GB/s",
        help="bandwidth between consecutive stages of a pipeline (default: --link)",
    )
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Print the tables on rank 0. Collective over MPI.COMM_WORLD."""
    print_tables(lambda: _tables(options), options.json)
    return 0


def _tables(options: argparse.Namespace) -> dict[str, Rows]:
    machine = Machine.load(options.machine)
    tables: dict[str, Callable[[], Rows]] = {
        "I-II": schedules_table,
        "III": lambda: table_iii(machine, options.link, options.neighbours),
        "IV": lambda: table_iv(machine),
        "VI": table_vi,
        "cuts": lambda: cuts_table(fitted_machine(machine)),
    }
    return {name: tables[name]() for name in options.tables}


# -- Table III --------------------------------------------------------------------------------------------------------


def table_iii(machine: Machine, link: float | None, neighbours: float | None) -> Rows:
    """Print the predicted and the published speed-ups over data parallelism with 64 samples per GPU.

    Parameters
    ----------
    machine : Machine
    link : float or None
        Bandwidth between GPUs, in bytes/s. None: fitted.
    neighbours : float or None
        Bandwidth between consecutive stages, in bytes/s. None: ``link``.

    Returns
    -------
    list of dict
    """
    if link is None:
        here = fitted_machine(machine)
    else:
        here = replace(machine, node=Link(machine.node.latency_s, link))
    link_bytes_per_s = here.node.bandwidth_bytes_per_s
    print("Table III: speedup in samples/s over data parallelism (DP) of 64 samples per GPU, ours (paper's);")
    source = "fitted to DP of VGG-16 on 4" if link is None else "given"
    print(f"{link_bytes_per_s / 1e9:.2f} GB/s between GPUs ({source})", end="")
    print(f"; {(neighbours or link_bytes_per_s) / 1e9:.2f} GB/s between the stages of one pipeline")
    print(f"{'model':<10}{'GPUs':>5}{'DP s':>7}  {'DP of 32':<13}{'PipeDream':<13}{'GPipe':<13}", end="")
    print(f"{'BaPipe, its schedule, M x B':<36}{'BaPipe explored':<32}joint, with accumulation")
    profiles = networks(here)
    # Only a pipeline can use a faster link between neighbours: an all-reduce is as fast as its slowest link.
    chain = replace(here, node=Link(machine.node.latency_s, neighbours or link_bytes_per_s))
    return [_row_iii(row, profiles[row.model], here, chain) for row in TABLE_III]


def _row_iii(row: SpeedupRow, profile: ProfileOf, machine: Machine, chain: Machine) -> dict[str, object]:
    base = throughput(profile, machine, row.gpus, schedule="dp", microbatches=row.gpus, size=GPU_BATCH)
    # At least 8 micro-batches per stage, or the bubble would dominate the explored pipelines. Rows for which BaPipe
    # chose data parallelism have only one micro-batch per GPU.
    batch = max(row.microbatches, 8 * row.gpus) * row.size
    powers = (1 << power for power in range(batch.bit_length()))
    counts = [count for count in powers if batch % count == 0 and 8 <= batch // count <= GPU_BATCH]
    # Without the first schedule, data parallelism. BaPipe chooses a pipeline only if it is faster than data parallelism
    # with one update per 64 samples of a GPU, which is ``base`` here.
    piped = explore(profile, chain, row.gpus, batch, microbatches=counts, schedules=SYNCHRONOUS[1:])
    joint = explore(profile, machine, row.gpus, batch, microbatches=counts, joint=True)
    links = machine if row.schedule == PARALLEL else chain
    rates = {
        "dp_32": throughput(profile, machine, row.gpus, schedule="dp", microbatches=row.gpus, size=GPU_BATCH // 2),
        "pipedream": pipedream_rate(profile, machine, row.gpus),
        "gpipe": throughput(profile, chain, row.gpus, schedule="gpipe", microbatches=row.gpipe[0], size=row.gpipe[1]),
        "bapipe": throughput(
            profile, links, row.gpus, schedule=row.schedule, microbatches=row.microbatches, size=row.size
        ),
        "pipeline": batch / piped.time,
        "joint": batch / joint.time,
    }
    ours = {name: rate / base for name, rate in rates.items()}
    paper = DP_AT_32.get(row.gpus) if row.model == "VGG-16" else None
    print(
        f"{row.model:<10}{row.gpus:>5}{row.gpus * GPU_BATCH / base:>7.3f}  {_with_published(ours['dp_32'], paper):<13}",
        end="",
    )
    print(
        f"{_with_published(ours['pipedream'], row.pipedream):<13}{_with_published(ours['gpipe'], row.gpipe[2]):<13}",
        end="",
    )
    setting = f"{row.schedule} {row.microbatches} x {row.size}: {_with_published(ours['bapipe'], row.bapipe)}"
    better = f"{_format_choice(piped, batch)}: {ours['pipeline']:.2f}"
    chosen = better if ours["pipeline"] > 1 else f"dp (pipeline: {ours['pipeline']:.2f})"
    print(f"{setting:<36}{chosen:<32}", end="")
    print(f"{_format_choice(joint, batch)}: {ours['joint']:.2f}")
    figures = {"pipeline": _choice_results(piped.best), "joint": _choice_results(joint.best)}
    return {"model": row.model, "gpus": row.gpus, "batch": batch, "speedup": ours, "explored": figures}


def throughput(
    profile: ProfileOf, machine: Machine, gpus: int, *, schedule: str, microbatches: int, size: int
) -> float:
    """Return the samples per second of one setting, without a memory limit: the paper ran all settings.

    Parameters
    ----------
    profile : ProfileOf
    machine : Machine
    gpus : int
        Number of GPUs.
    schedule : str
        Name of a schedule, or ``"dp"``, for which ``microbatches`` is the number of GPUs.
    microbatches : int
        Number of micro-batches of a mini-batch.
    size : int
        Samples of a micro-batch.

    Returns
    -------
    float
    """
    batch = microbatches * size
    exploration = explore(
        profile, machine, gpus, batch, microbatches=[microbatches], schedules=[schedule], memory=float(1 << 60)
    )
    return batch / exploration.time


def pipedream_rate(profile: ProfileOf, machine: Machine, gpus: int) -> float:
    """Return the samples per second of PipeDream's partition for mini-batches of 64 samples, by its own cost model.

    Parameters
    ----------
    profile : ProfileOf
    machine : Machine
    gpus : int
        Number of GPUs.

    Returns
    -------
    float
    """
    stages = partition(profile(GPU_BATCH), gpus, machine.node.bandwidth_bytes_per_s, "pipedream")
    return GPU_BATCH / stages.time


def fitted_machine(machine: Machine) -> Machine:
    """Return the machine with the link that Table III implies, and an all-reduce without overlap."""
    link = Link(machine.node.latency_s, implied_link(machine))
    return replace(machine, node=link, overlap=Overlap(halo=False, allreduce=False))


def implied_link(machine: Machine) -> float:
    """Return the bandwidth at which DP of VGG-16 on 4 GPUs reproduces Table III's loss with 32 samples, in bytes/s.

    With T_B = C_B + A for B samples per GPU, where C_B is the computation and A the all-reduce of all parameters,
    Table III has (T_64 / 64) / (T_32 / 32) = 0.62. So C_64 + A = r (C_32 + A) with r = 2 x 0.62, which gives A.
    """
    vgg16 = networks(machine)["VGG-16"]
    compute_32, compute_64 = (sum(layer.time_s for layer in vgg16(size).layers) for size in (GPU_BATCH // 2, GPU_BATCH))
    ratio = 2 * DP_AT_32[FITTED_GPUS]
    allreduce_s = (compute_64 - ratio * compute_32) / (ratio - 1)
    parameters = sum(layer.parameter_bytes for layer in vgg16(1).layers)
    # A ring all-reduce over p GPUs sends 2 (p - 1) / p of the bytes over each link. Latencies are left out.
    return 2 * (FITTED_GPUS - 1) / FITTED_GPUS * parameters / allreduce_s


def _with_published(ours: float, paper: float | None) -> str:
    return f"{ours:.2f}" + ("" if paper is None else f" ({paper:.2f})")


def _format_choice(exploration: Exploration, batch: int) -> str:
    replicas = f" x {exploration.best.replicas}" if exploration.best.replicas > 1 else ""
    microbatches = f"{exploration.microbatches} x {batch // exploration.microbatches}"
    return f"{exploration.schedule} {len(exploration.best.memory)}{replicas}, {microbatches}"


def _choice_results(choice: Choice) -> dict[str, object]:
    return {
        "schedule": choice.schedule,
        "microbatches": choice.microbatches,
        "replicas": choice.replicas,
        "cuts": choice.stages.cuts,
        "time_s": choice.time,
        "memory_bytes": choice.memory,
    }
