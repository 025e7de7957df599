"""Writes docs/evidence/third-party.md and .csv: networks of others over grids of two and four ranks and one process.

``mpiexec -n 4 python -m tests.layers.models.third_party_page docs/evidence/third-party.md`` with the extra third-party.
"""

from __future__ import annotations

import csv
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

from mpi4py import MPI

import distconv as dc
from distconv.communication.transport import count_traffic
from distconv.jobs.planning.options import run_on_rank_0
from distconv.jobs.verification.engine import journal
from distconv.layers.common import call_site
from tests.layers.models.paper_networks.networks import PAPERS
from tests.layers.models.step_costs import activation_bytes, sent_bytes
from tests.layers.models.test_third_party import GRIDS, Values, check, results, train
from tests.layers.models.third_party_imaging import IMAGING
from tests.layers.models.third_party_modern import MODERN
from tests.layers.models.third_party_networks import LARGE, NETWORKS, Network, built
from tests.layers.models.third_party_science import SCIENCE

HEAD = """\
# Networks of other packages

<!-- Generated; do not edit.
Command: mpiexec -n 4 python -m tests.layers.models.third_party_page docs/evidence/third-party.md -->

The networks are built by their packages and unchanged; those of *its paper* are written from it in plain PyTorch. Each
runs one step of SGD with momentum in training mode, then an evaluation, in float64 (or float32 if a network requires
it). Outputs, gradients of weights and of the input, weights and buffers after the step, and the evaluation's outputs
are compared with one process.

*exact*: each tensor to 1e-9 of its largest number (1e-4 in float32). *Memory*: the peak of a forward pass on the rank
with the highest, divided by that of one process. It is what torch's CPU allocator has given out for activations and
temporary tensors. Weights, which spatial grids replicate, do not count.

The networks are narrow and their inputs small, so that halos and temporary tensors weigh more than in practice. Sounds
and the points of a mesh are split along their length by `h`.
"""


PAIRS, FOUR = GRIDS[2], GRIDS[4][0]
"""Grids of two ranks, and the one of four."""

TAIL = """
## Bytes beyond halos

With `h=2`, convolutions, pooling, shifted windows (`torch.roll`) and windows that end at blocks send halos or nothing.
These calls send more:

| call | networks | bytes |
| --- | --- | --- |
| attention over all pixels | ViT, DiT, ClimaX | keys and values of all other ranks |
| windows across blocks | Swin, HAT, HaloNet, Pangu-Weather | keys and values of the windows, or their pixels |
| bias of positions added in windows | Swin, SwinIR, HAT, SCUNet | its gradient (heads, n, n) in each block |
| linear layer over pixels | MLP-Mixer, gMLP | the activation, in both passes |
| product with a matrix of pixels by pixels | LambdaResNet | its gradient, 17 of 20 MB |
| standardized weights | NFNet | their gradients, 174 of 176 MB, as large as the weights |
| custom Functions and operators | NAFNet, SFNO, Spherical U-Net | full tensors: they are computed replicated |
| edges between nodes | GraphCast | gradients of the nodes |
| `torch.rot90` of faces | DLWP | the faces |

## All networks

A cell of [the table](NAME) has, separated by dots:

1. *exact*, or *WRONG*.
2. Memory.
3. Bytes that the rank that sends most sends in a step: messages, and 2 (p - 1) / p of each buffer that p ranks
   all-reduce. The all-reduce of the weights' gradients does not count.
4. *warn*: the calls that are computed replicated, with the bytes that every rank gathers for them.

```{csv-table}
:file: NAME
:header-rows: 1
```
"""


class Outcome(NamedTuple):
    """Result of a network on one grid."""

    text: str
    memory: int
    sent: int
    warnings: int
    gathered: int

    def cell(self, one: int) -> str:
        """Return the cell of the table; ``one``: the memory of one process."""
        warned = f" · {self.warnings} warn ({journal.size(self.gathered)})" if self.warnings else ""
        return f"{self.text} · {self.memory / one:.2f} · {journal.size(self.sent)}{warned}"


class Row(NamedTuple):
    """Results of a network: the memory of one process, and a result for each grid."""

    memory: int
    outcomes: dict[str, Outcome]

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        return [each.cell(self.memory) for each in self.outcomes.values()]


def outcome(comm: MPI.Intracomm, network: Network, expected: Values, grid: str) -> Outcome:
    """Run ``network`` over ``grid`` and compare. Collective."""
    call_site.clear_warned_sites()
    process_grid = dc.ProcessGrid(comm, **dc.parse_grid(grid))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, inputs = dc.parallelize(built(network), process_grid), network.inputs(process_grid)
        with count_traffic() as traffic:
            outputs = train(model, inputs)
        found = results(model, inputs, outputs)
        memory = activation_bytes(model, inputs)
    try:
        check(found, expected, grid)
        text = "exact"
    except AssertionError:
        text = "WRONG"
    replications = [str(w.message) for w in caught if issubclass(w.category, dc.ReplicationWarning)]
    gathered = (
        int(amount.replace(",", "")) for t in replications for amount in re.findall(r"gathers ([\d,]+) bytes", t)
    )
    return Outcome(
        "exact" if set(comm.allgather(text)) == {"exact"} else "WRONG",
        comm.allreduce(memory, MPI.MAX),
        comm.allreduce(sent_bytes(traffic), MPI.MAX),
        len(replications),
        sum(gathered),
    )


def alone(network: Network) -> tuple[Values, int]:
    """Return the results of one process, and its memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, inputs = built(network), network.inputs()
        expected = results(model, inputs, train(model, inputs))
        return expected, activation_bytes(model, inputs)


def row(comm: MPI.Intracomm, pair: MPI.Intracomm, network: Network) -> Row:
    """Return the results of a network: on each pair of ranks over some grids, then on four ranks. Collective."""
    expected, memory = run_on_rank_0(comm, lambda: alone(network))
    mine = {grid: outcome(pair, network, expected, grid) for grid in PAIRS[comm.rank // 2 :: 2]}
    found = {grid: each for part in comm.allgather(mine) for grid, each in part.items()}
    return Row(memory, {**{grid: found[grid] for grid in PAIRS}, FOUR: outcome(comm, network, expected, FOUR)})


def rows(comm: MPI.Intracomm, networks: Mapping[str, Network]) -> dict[str, Row]:
    """Return the results of all networks. Collective."""
    pair, found = comm.Split(comm.rank // 2), {}
    for name, network in networks.items():
        found[name] = row(comm, pair, network)
        if comm.rank == 0:
            print(name, *found[name].cells(), sep=" | ", flush=True)
    return found


def summary(found: Mapping[str, Row], networks: Mapping[str, Network]) -> str:
    """Return a table with a line for each package."""
    grids = [*PAIRS, FOUR]
    columns = ["package", "networks", "exact runs", "networks that warn", *(f"memory, {grid}" for grid in grids)]
    lines = [f"| {' | '.join(columns)} |", f"{'| --- ' * len(columns)}|"]
    for package in dict.fromkeys(networks[name].package for name in found):
        mine = [row for name, row in found.items() if networks[name].package == package]
        exact = sum(each.text == "exact" for row in mine for each in row.outcomes.values())
        warned = sum(any(each.warnings for each in row.outcomes.values()) for row in mine)
        medians = (median(row.outcomes[grid].memory / row.memory for row in mine) for grid in grids)
        counts = f"{len(mine)} | {exact} of {len(mine) * len(grids)} | {warned}"
        lines.append(f"| {package} | {counts} | {' | '.join(f'{each:.2f}' for each in medians)} |")
    return "\n".join(lines) + "\n"


def write_page(path: Path, found: Mapping[str, Row], networks: Mapping[str, Network]) -> None:
    """Write the page, and next to it the table with a line for each network."""
    outcomes = [each for row in found.values() for each in row.outcomes.values()]
    exact = sum(each.text == "exact" for each in outcomes)
    total = f"{len(found)} networks on {len(PAIRS) + 1} grids: {exact} of {len(outcomes)} runs exact."
    with path.with_suffix(".csv").open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["network", "package", *PAIRS, FOUR])
        lines.writerows([name, networks[name].package, *row.cells()] for name, row in found.items())
    tail = TAIL.replace("NAME", path.with_suffix(".csv").name)
    path.write_text(f"{HEAD}\n{total}\nMemory is the median of a package.\n\n{summary(found, networks)}{tail}")


def main() -> int:
    """Run all, or those that the command line names; 1 if one is wrong."""
    comm = MPI.COMM_WORLD
    networks = {**NETWORKS, **MODERN, **LARGE, **SCIENCE, **IMAGING, **PAPERS}
    found = rows(comm, {name: networks[name] for name in sys.argv[2:] or networks})
    if comm.rank == 0:
        write_page(Path(sys.argv[1]), found, networks)
    return any(each.text != "exact" for row in found.values() for each in row.outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
