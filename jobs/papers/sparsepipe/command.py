"""Reproduce pipeline partitions of networks: published layer profiles, and SparsePipe's mixed GPUs.

The first table requires profiles (PipeDream's text format or distconv's). The second takes its layer times from a
roofline, or from a measured profile of the sparse network. It also shows data parallelism (DP), as in Figure 9.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from distconv.jobs.papers.printed_tables import Rows, add_json_argument, print_tables
from distconv.jobs.papers.sparsepipe import setting as published
from distconv.jobs.training.options import positive_float, positive_int
from distconv.perfmodel.profiles.layer_profile import Profile
from distconv.perfmodel.stages.devices import Device
from distconv.perfmodel.stages.dynamic_program import fixed_moves
from distconv.perfmodel.stages.partition import METHODS, StagePartition, fastest_stages, partition, stage_time
from distconv.perfmodel.stages.stage_costs import COSTS, PrefixSums, stages_between

EXAMPLES = """\
examples:
  distconv reproduce sparsepipe
  distconv reproduce sparsepipe --gigabits 1 10
  distconv profile --layers --model sparse_vgg16_bn --input 1,50,50,50 --batch 64 --classes 40 --out sparse.json
  distconv reproduce sparsepipe --measured sparse.json --measured-batch 64
  distconv profile --model vgg16 --layers --out vgg16.json
  distconv reproduce sparsepipe vgg16.json --devices 2 4 8
"""

GIGABIT = 1e9 / 8
"""Bytes per second of 1 Gbit/s."""

FIGURE_9 = "Figure 9 and IV-C: MP 1.33 to 2.27 times as fast as DP, HETE-MP 2.41 to 3.11 times"
SHOWN = {"sparsepipe": "sorted", "exact": "exact", "pipedream": "MP"}
"""Methods of :func:`partition` that the table compares, and their headings.

``sparsepipe`` is the paper's HETE-MP: stages take the GPUs in sorted order (Algorithms 1 and 2). ``pipedream`` is MP,
which assumes equal GPUs. ``exact`` searches all groups of GPUs.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv reproduce sparsepipe``."""
    parser.add_argument(
        "profiles",
        nargs="*",
        metavar="PROFILE",
        help="layer profiles to partition, written by PipeDream or distconv profile --layers (default: none)",
    )
    parser.add_argument(
        "--devices",
        type=positive_int,
        nargs="+",
        default=[4, 8],
        metavar="N",
        help="numbers of devices to partition the profiles for (default: 4 8)",
    )
    parser.add_argument(
        "--bandwidth",
        type=positive_float,
        default=1e9,
        help="bandwidth between devices for the profiles, in bytes/s (default: %(default)g)",
    )
    parser.add_argument(
        "--gigabits",
        type=positive_float,
        nargs="+",
        default=[1, 2.5, 5, 10],
        metavar="G",
        help="bandwidths between the mixed GPUs, in Gbit/s (default: 1 2.5 5 10)",
    )
    parser.add_argument(
        "--messages",
        type=positive_float,
        default=1.0,
        metavar="X",
        help="factor on the size of the messages between layers (default: 1)",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        default=published.MEASURED,
        metavar="PROFILE",
        help="measured layer profile of the sparse network (default: a stored one, with 16 shapes at 50^3 voxels)",
    )
    parser.add_argument(
        "--measured-batch",
        type=positive_int,
        default=published.MEASURED_BATCH,
        metavar="N",
        help="samples of the measured layer profile (default: %(default)s)",
    )
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Print the tables on rank 0. Collective over MPI.COMM_WORLD."""
    print_tables(lambda: _tables(options), options.json)
    return 0


def _tables(options: argparse.Namespace) -> dict[str, Rows]:
    sources = [
        *map(published.by_roofline, (True, False)),
        *published.as_measured(options.measured, options.measured_batch),
    ]
    tables = {
        "profiles": profile_table(options.profiles, options.devices, options.bandwidth),
        "mixed": [
            row
            for source in sources
            for row in mixed_table(source.with_larger_messages(options.messages), options.gigabits)
        ],
    }
    print(f"\nthe paper, {FIGURE_9}")
    return tables


def profile_table(paths: Sequence[str], counts: Sequence[int], bandwidth: float) -> Rows:
    """Print PipeDream's partition of each profile, and the times of all methods under SparsePipe's Eqs. 4 and 5.

    Parameters
    ----------
    paths : sequence of str
        Profiles.
    counts : sequence of int
        Numbers of devices.
    bandwidth : float
        Bytes per second.

    Returns
    -------
    list of dict
    """
    profiles = [(Path(path).stem, Profile.load(path)) for path in paths]
    if profiles:
        print(f"PipeDream's optimizer, {bandwidth:g} bytes/s; times per mini-batch in s; right: all under Eqs. 4-5")
        print(f"{'profile':<16}{'devices':>8}{'replicas':>12}{'time':>10}{'speedup':>9}  ", end="")
        print("".join(f"{method:>12}" for method in METHODS), " first layer of each stage")
    rows: Rows = []
    for name, profile in profiles:
        alone = sum(layer.time_s for layer in profile.layers)
        for count in counts:
            partitions = {method: partition(profile, count, bandwidth, method) for method in METHODS}
            costs = {method: stage_time(profile, each, count, bandwidth) for method, each in partitions.items()}
            own = partitions["pipedream"]
            print(f"{name:<16}{count:>8}{_format_replicas(own):>12}{own.time:>10.5f}", end="")
            print(f"{alone / own.time:>9.2f}  ", end="")
            print("".join(f"{cost:>12.5f}" for cost in costs.values()), "", " ".join(stage[0] for stage in own.stages))
            rows.append({"profile": name, "devices": count, **_stage_results(own), "eq5_s": costs})
    return rows


def mixed_table(source: published.ProfileSource, gigabits: Sequence[float]) -> Rows:
    """Print and return the partitions for the GPUs of Table III and those of the paper, one row for each bandwidth.

    Parameters
    ----------
    source : published.ProfileSource
        Layer times.
    gigabits : sequence of float
        Bandwidths in Gbit/s.

    Returns
    -------
    list of dict
    """
    # The layer times of MP, which has only one for each layer. The paper's profile is of a Titan XP, too (Figure 7).
    profile = source.on("TitanXP")
    print(
        f"\nSparsePipe, Table III: VGG16-BN, {source.name}, batch {published.BATCH}; times per mini-batch in s under "
        "Eqs. 4-5; = as in the paper; x: times as fast as DP"
    )
    print(f"{'GPUs':>4}{'Gb/s':>6}  ", "".join(f"{name:<12}{'time':>9}  " for name in SHOWN.values()), sep="", end="")
    print(f"{'ratio':<7}{'paper MP':<11}{'paper HETE':<11}{'time':>9}{'DP':>10}{'x MP':>7}{'x sorted':>9}", end="")
    print("  sorted order's stages")
    rows: Rows = []
    is_reproduced: list[bool] = []
    search_s = dict.fromkeys(SHOWN, 0.0)
    for published_row in published.TABLE_III:
        devices = source.devices(published_row.counts)
        for gigabit in gigabits:
            bandwidth = gigabit * GIGABIT
            partitions = {}
            for method in SHOWN:
                start = time.perf_counter()
                partitions[method] = partition(profile, devices, bandwidth, method)
                search_s[method] += time.perf_counter() - start
            costs = {method: stage_time(profile, each, devices, bandwidth) for method, each in partitions.items()}
            published_s = as_published(profile, published_row, devices, bandwidth)
            # HETE-MP and the exact search choose GPUs for each stage. For MP the paper prints only their numbers.
            same = {
                "sparsepipe": partitions["sparsepipe"].assignment == published_row.assignment,
                "exact": partitions["exact"].assignment == published_row.assignment,
                "pipedream": _format_replicas(partitions["pipedream"]) == published_row.homogeneous,
            }
            is_reproduced.append(same["sparsepipe"])
            print(f"{sum(published_row.counts.values()):>4}{gigabit:>6g}  ", end="")
            for method in SHOWN:
                print(
                    f"{_format_replicas(partitions[method]):<11}{'=' if same[method] else ' '}{costs[method]:>9.5f}  ",
                    end="",
                )
            print(f"{costs['sparsepipe'] / costs['exact']:>5.3f}  {published_row.homogeneous:<11}", end="")
            alone = data_parallel(profile, devices, bandwidth)
            print(f"{published_row.heterogeneous:<11}{published_s:>9.5f}{alone:>10.5f}", end="")
            print(
                f"{alone / costs['pipedream']:>7.2f}{alone / costs['sparsepipe']:>9.2f} ",
                _format_stages(partitions["sparsepipe"]),
            )
            rows.append({"source": source.name, "gigabit": gigabit, "as_published": same, "time_s": costs})
            rows[-1]["data_parallel_s"] = alone
            rows[-1] |= {
                "published_s": published_s,
                "stages": {method: _stage_results(each) for method, each in partitions.items()},
            }
    print(_explain_splits(source, is_reproduced))
    print("searched for " + ", ".join(f"{1e3 * search_s[m] / len(rows):.1f} ms ({SHOWN[m]})" for m in SHOWN) + " a row")
    return rows


def _explain_splits(source: published.ProfileSource, same: Sequence[bool]) -> str:
    """Return how many of the paper's splits are reproduced, and the fraction of time that decides on them."""
    times = [layer.time_s for layer in source.on("TitanXP").layers]
    late = sum(times[published.CUT :]) / sum(times)
    return (
        f"HETE-MP's splits: {sum(same)} of {len(same)}. Layers {published.CUT}-{len(times) - 1} on one GPU and the "
        "others on 4, 6 or 7 are an even split if they take about 20, 14 or 12.5 % of the time; here they take "
        f"{late:.1%}"
    )


def as_published(profile: Profile, row: published.GpuRow, devices: Sequence[Device], bandwidth: float) -> float:
    """Return the seconds per mini-batch of the paper's HETE-MP groups.

    The paper prints the split point of one row only (IV-C), so the best ones for the groups are used.

    Parameters
    ----------
    profile : Profile
    row : published.GpuRow
        Row of Table III.
    devices : sequence of Device
    bandwidth : float
        Bytes per second.

    Returns
    -------
    float
    """
    groups = [tuple(held.get(device.name, 0) for device in devices) for held in row.assignment]
    terms = PrefixSums(profile, devices, bandwidth, COSTS["sparsepipe"])
    return terms.time(fastest_stages(terms, fixed_moves(groups)))


def data_parallel(profile: Profile, devices: Sequence[Device], bandwidth: float) -> float:
    """Return the seconds per mini-batch of the full network on every device (Eq. 4).

    Parameters
    ----------
    profile : Profile
    devices : sequence of Device
    bandwidth : float
        Bytes per second.

    Returns
    -------
    float
    """
    terms = PrefixSums(profile, devices, bandwidth, COSTS["sparsepipe"])
    return terms.time(stages_between([0, terms.size], [tuple(device.count for device in devices)]))


def _format_replicas(chosen: StagePartition) -> str:
    return "-".join(map(str, chosen.replicas))


def _format_stages(chosen: StagePartition) -> str:
    groups = [" + ".join(f"{count} {name}" for name, count in held.items()) for held in chosen.assignment]
    edges = [0, *chosen.cuts, sum(map(len, chosen.stages))]
    return " ".join(f"({group}: {a}-{b - 1})" for group, (a, b) in zip(groups, pairwise(edges), strict=True))


def _stage_results(chosen: StagePartition) -> dict[str, object]:
    return {
        "cuts": chosen.cuts,
        "replicas": chosen.replicas,
        "assignment": chosen.assignment,
        "predicted_s": chosen.time,
    }
