"""Writes docs/evidence/third-party.md: other people's networks over four grids of four ranks against one process.

``mpiexec -n 4 python -m tests.layers.models.third_party_page docs/evidence/third-party.md`` with the extra third-party.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpi4py import MPI

import distconv as dc
from distconv.jobs.verification.engine import journal
from distconv.layers.common import call_site
from tests.distconv.layouts import normal
from tests.layers.models.test_third_party import GRIDS, Values, check, step
from tests.layers.models.third_party_modern import MODERN
from tests.layers.models.third_party_networks import LARGE, NETWORKS, Network, built

HEAD = """\
# Networks of other packages

<!-- Generated; do not edit.
Command: mpiexec -n 4 python -m tests.layers.models.third_party_page docs/evidence/third-party.md -->

The networks are built by their packages and unchanged. Each runs one step of SGD with momentum in training mode, then
an evaluation, in float64 (or float32 if a network requires it). Outputs, gradients of weights and of the input,
weights and buffers after the step, and the evaluation's outputs are compared with one process.

*exact*: each tensor to 1e-9 of its largest number (1e-4 in float32). *warn* counts the calls that are computed
replicated, with the bytes that every rank gathers for them.
"""


class Outcome(NamedTuple):
    """Result of a network on one grid."""

    text: str
    warnings: int
    bytes: int

    def __str__(self) -> str:
        warned = f", {self.warnings} warn ({journal.size(self.bytes)})" if self.warnings else ""
        return f"{self.text}{warned}"


def outcome(comm: MPI.Intracomm, network: Network, expected: Values, grid: str) -> Outcome:
    """Run ``network`` over ``grid`` and compare. Collective."""
    call_site.clear_warned_sites()
    x = normal(*network.shape, seed=8).to(network.dtype)
    process_grid = dc.ProcessGrid(comm, **dc.parse_grid(grid))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = step(dc.parallelize(built(network), process_grid), dc.scatter(x, process_grid).requires_grad_())
    try:
        check(found, expected, grid)
        text = "exact"
    except AssertionError:
        text = "WRONG"
    texts = set(comm.allgather(text))
    replications = [str(w.message) for w in caught if issubclass(w.category, dc.ReplicationWarning)]
    gathered = (
        int(amount.replace(",", "")) for t in replications for amount in re.findall(r"gathers ([\d,]+) bytes", t)
    )
    return Outcome("exact" if texts == {"exact"} else "WRONG", len(replications), sum(gathered))


def rows(comm: MPI.Intracomm, networks: Mapping[str, Network]) -> dict[str, list[Outcome]]:
    """Return the result of each network on each grid. Collective."""
    found = {}
    for name, network in networks.items():
        x = normal(*network.shape, seed=8).to(network.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = step(built(network), x.requires_grad_())
        found[name] = [outcome(comm, network, expected, grid) for grid in GRIDS[comm.size]]
        if comm.rank == 0:
            print(name, *found[name], sep=" | ", flush=True)
    return found


def main() -> int:
    """Run all; 1 if one is wrong."""
    comm, networks = MPI.COMM_WORLD, {**NETWORKS, **MODERN, **LARGE}
    found = rows(comm, networks)
    outcomes = [each for row in found.values() for each in row]
    wrong = [each for each in outcomes if each.text != "exact"]
    if comm.rank == 0:
        warned = sum(any(each.warnings for each in row) for row in found.values())
        total = f"{len(found)} networks on {len(GRIDS[comm.size])} grids: {len(outcomes) - len(wrong)} of "
        total += f"{len(outcomes)} runs exact; {warned} networks warn.\n"
        head = f"| network | package | {' | '.join(GRIDS[comm.size])} |\n{'| --- ' * (2 + len(GRIDS[comm.size]))}|\n"
        lines = (f"| {n} | {networks[n].package} | {' | '.join(map(str, row))} |\n" for n, row in found.items())
        Path(sys.argv[1]).write_text(f"{HEAD}\n{total}\n{head}{''.join(lines)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
