"""One rank alone differs: whatever ranks compare, an error with one text is raised on all of them, and none waits."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.communication import agreement
from distconv.communication.transfer import transfer_plan
from distconv.data.box_function import BoxFunction
from distconv.data.channel_statistics import moments
from distconv.data.hdf5 import Layout
from distconv.data.loader import Field, Loader
from distconv.data.opening import open_source
from distconv.data.reading_processes import ReadByProcesses
from distconv.data.resizing import Resized
from distconv.kernels.scan.backpropagation import backpropagate
from distconv.layers import sparse
from distconv.layers.sparse.tensor import SparseTensor
from distconv.parameters.weight_files import load_weights, read_weights
from distconv.pipeline.runtime.pipeline import Pipeline
from distconv.pipeline.runtime.pipeline_plan import PipelinePlan
from tests.distconv.data.stored_samples import slow
from tests.distconv.layouts import counting, grid_over, normal

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.time_limit(20)]


class Rank:
    """One rank of a case: the last one passes something else."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.size = comm, comm.size
        self.odd = comm.rank == comm.size - 1
        self.grid = grid_over(comm, h=comm.size)
        self.grid.scattered = 0

    def pick(self, usual: Any, other: Any) -> Any:
        return other if self.odd else usual

    def split(self, x: torch.Tensor) -> dc.DistTensor:
        """``x`` with its last dimension split."""
        return dc.scatter(x, dc.Distribution(self.grid, (None,) * (x.dim() - 1) + ("h",)))

    def last(self, x: torch.Tensor, value: float) -> dc.DistTensor:
        """``x`` split, its last element, which the last rank owns, ``value``."""
        changed = x.clone()
        changed.view(-1)[-1] = value
        return self.split(changed)


Case = tuple[Callable[[Rank], object], str]
"""A collective call, and what the error says, on all ranks."""


@pytest.fixture
def rank(comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """This rank in a folder of its own: a relative path names another file on each, as one node may see it."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return Rank(comm)


def check(rank: Rank, call: Callable[[Rank], object], text: str) -> None:
    with pytest.raises((dc.DistconvError, IndexError, RuntimeError), match=text) as caught:
        call(rank)
    assert len(set(rank.comm.allgather(f"{type(caught.value)} {caught.value}"))) == 1


# -- tensors, layouts and models ------------------------------------------------------------------------------------


def scattered(change: Callable[[torch.Tensor], Any], number: int = 9) -> Callable[[Rank], object]:
    """As the tensor of that ``number``: values are compared of the first ones."""

    def call(r: Rank) -> object:
        r.grid.scattered = number
        return dc.scatter(r.pick(lambda x: x, change)(counting(4, 3)), r.grid, dims="nh")

    return call


def no_grad(call: Callable[[Rank], object]) -> Callable[[Rank], object]:
    return lambda r: r.pick(call, torch.no_grad()(call))(r)


def blocks(other: dict[str, Any]) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        named = {"shape": (2, 3 * r.size), "axes": (None, "h"), "block": torch.zeros(2, 3)} | r.pick({}, other)
        return dc.from_local(named["block"], dc.Distribution(r.grid, named["axes"]), named["shape"])

    return call


def parallelized(make: Callable[[], nn.Module], **named: Any) -> Callable[[Rank], object]:
    return lambda r: dc.parallelize(
        r.pick(partial(nn.Conv2d, 2, 3, 3), make)(), r.grid, broadcast=True, **r.pick({}, named)
    )


def forward(change: Callable[[nn.Module], object], gradients: bool = True) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        model = dc.parallelize(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout()), r.grid)
        r.pick(lambda _: None, change)(model)
        x = dc.scatter(torch.ones(1, 2, 9, 9), r.grid)
        with torch.set_grad_enabled(r.pick(True, gradients)):
            return model(x)

    return call


def split_state(
    make: Callable[[list[torch.Tensor]], Any], *shapes: Sequence[int], **kind: Any
) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        parameters = [nn.Parameter(torch.zeros(*shape, **kind)) for shape in shapes]
        return dc.shard_optimizer(
            r.pick(torch.optim.Adam, make)(r.pick([nn.Parameter(torch.zeros(2))], parameters)), r.comm
        )

    return call


def other_plan(**named: Any) -> Callable[[Rank], object]:
    given = {"layers": {"*": {"h": 1}}, "batch_norm": "global"}
    return lambda r: dc.parallelize(nn.Conv2d(2, 3, 3), dc.Plan(**given | r.pick({}, named)), comm=r.comm)


def with_weight(change: Callable[[torch.Tensor], object]) -> nn.Module:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        change(model.weight.fill_(1))
    return model


class Other(nn.Conv2d):
    pass


TENSORS: dict[str, Case] = {
    "grid: axes": (lambda r: dc.ProcessGrid(r.comm, **{r.pick("h", "w"): r.size}), "ProcessGrid: ranks disagree"),
    "grid: extents": (lambda r: dc.ProcessGrid(r.comm, h=r.size, w=r.pick(1, 2)), "ProcessGrid: ranks disagree"),
    "scatter: shape": (scattered(lambda x: x.view(3, 4)), "scatter: ranks disagree"),
    "scatter: dtype": (scattered(torch.Tensor.float), "scatter: ranks disagree"),
    "scatter: a value": (scattered(lambda x: x + (x == 12), number=0), "scatter: ranks disagree"),
    "scatter: requires_grad": (scattered(torch.Tensor.requires_grad_), "scatter: ranks disagree"),
    "scatter: no tensor": (scattered(lambda x: None), "scatter: ranks disagree"),
    "scatter: dimensions": (scattered(lambda x: x[0]), "scatter: ranks disagree"),
    "scatter: dims": (lambda r: dc.scatter(counting(4, 3), r.grid, dims=r.pick("nh", "hn")), "scatter: ranks disagree"),
    "scatter: no values": (scattered(lambda x: x.to("meta")), "scatter: ranks disagree"),
    "scatter: sparse": (scattered(torch.Tensor.to_sparse, number=0), "scatter: ranks disagree"),
    "scatter: no_grad": (no_grad(scattered(lambda x: x)), "under no_grad.* on rank"),
    "scatter from a root: no_grad": (
        no_grad(lambda r: dc.scatter(counting(4), r.grid, dims="h", root=0)),
        "under no_grad.* on rank",
    ),
    "scatter: root": (lambda r: dc.scatter(counting(4), r.grid, dims="h", root=r.pick(0, 1)), "root=1 on rank"),
    "scatter: only one has a root": (
        lambda r: dc.scatter(counting(4), r.grid, dims="h", **r.pick({}, {"root": 0})),
        "scatter: ranks disagree",
    ),
    "from_local: shape": (blocks({"shape": (2, 99)}), "from_local: ranks disagree"),
    "from_local: dtype": (blocks({"block": torch.zeros(2, 3).double()}), "from_local: ranks disagree"),
    "from_local: axes": (blocks({"axes": ("h", None)}), "from_local: ranks disagree"),
    "from_local: requires_grad": (
        blocks({"block": torch.zeros(2, 3, requires_grad=True)}),
        "requires_grad, .* on rank",
    ),
    "from_local: block": (blocks({"block": torch.zeros(2, 4)}), r"the block is \(2, 4\) but .* \(on rank"),
    "transfer plan: shape": (
        lambda r: transfer_plan(
            dc.Distribution(r.grid, (None, "h")), dc.Distribution(r.grid, ("h", None)), (2, r.pick(9, 8))
        ),
        "transfer plan: ranks disagree",
    ),
    "transfer plan: target": (
        lambda r: transfer_plan(
            dc.Distribution(r.grid, (None, "h")), dc.Distribution(r.grid, r.pick(("h", None), (None, None))), (2, 9)
        ),
        "transfer plan: ranks disagree",
    ),
    "parallelize: class": (parallelized(lambda: Other(2, 3, 3)), "parallelize: ranks disagree"),
    "parallelize: shape": (parallelized(lambda: nn.Conv2d(2, 3, 5)), "parallelize: ranks disagree"),
    "parallelize: dtype": (parallelized(lambda: nn.Conv2d(2, 3, 3).double()), "parallelize: ranks disagree"),
    "parallelize: parameters": (parallelized(lambda: nn.Conv2d(2, 3, 3, bias=False)), "parallelize: ranks disagree"),
    "parallelize: batch norm": (
        parallelized(lambda: nn.Conv2d(2, 3, 3), batch_norm="local"),
        "parallelize: ranks disagree",
    ),
    "parallelize: a weight": (
        lambda r: dc.parallelize(with_weight(lambda w: r.odd and w[1].fill_(2)), r.grid),
        "1 of 2 .* differ between ranks, the first is 'weight'",
    ),
    "parallelize: unknown batch norm": (
        parallelized(lambda: nn.Conv2d(2, 3, 3), batch_norm="never"),
        "parallelize: ranks disagree",
    ),
    "parallelize: a lazy layer": (parallelized(lambda: nn.LazyConv2d(3, 3)), "parallelize: ranks disagree"),
    "plan: layers": (other_plan(layers={"*": {"h": 2}}), "plan: ranks disagree"),
    "plan: batch norm": (other_plan(batch_norm="local"), "ranks disagree"),
    "plan: ranks": (other_plan(ranks=2), "plan: ranks disagree"),
    "forward: mode": (forward(nn.Module.eval), r"in eval\(\) on rank"),
    "forward: no_grad": (forward(lambda _: None, gradients=False), r"in train\(\), under no_grad on rank"),
    "replicas: a weight": (
        lambda r: dc.check_replicas(with_weight(lambda w: r.odd and w[1].fill_(2)), r.comm),
        "1 of 2 .* no longer the same on all ranks, the first is 'weight'",
    ),
    "optimizer: kind": (split_state(torch.optim.SGD, (2,)), "shard_optimizer: ranks disagree"),
    "optimizer: kind that cannot be split": (split_state(torch.optim.LBFGS, (2,)), "LBFGS"),
    "optimizer: shape": (split_state(torch.optim.Adam, (3,)), "shard_optimizer: ranks disagree"),
    "optimizer: dtype": (split_state(torch.optim.Adam, (2,), dtype=torch.float64), "shard_optimizer: ranks disagree"),
    "optimizer: parameters": (split_state(torch.optim.Adam, (2,), (2,)), "shard_optimizer: ranks disagree"),
    "optimizer: a value": (
        lambda r: dc.shard_optimizer(torch.optim.SGD(with_weight(lambda w: r.odd and w.mul_(2)).parameters()), r.comm),
        "1 of 2 whole parameters differ between ranks, the first is number 0",
    ),
    "trace: folder": (lambda r: dc.trace(r.pick("a", "b"), r.comm).__enter__(), "trace: ranks disagree"),
    "sparse scatter: coordinates": (lambda r: cloud(r, at=r.pick(2, 4)), "sparse scatter: ranks disagree"),
    "sparse scatter: dtype": (lambda r: cloud(r, dtype=r.pick(torch.float32, torch.float64)), "sparse scatter"),
    "sparse scatter: channels": (lambda r: cloud(r, channels=r.pick(1, 2)), "sparse scatter: ranks disagree"),
    "sparse scatter: batch": (lambda r: cloud(r, samples=r.pick(1, 2)), "sparse scatter: ranks disagree"),
    "sparse scatter: stride": (lambda r: cloud(r, stride=r.pick(1, 2)), "sparse scatter: ranks disagree"),
    "sparse scatter: boxes": (
        lambda r: cloud(r, partition=r.pick(None, of_other(r))),
        "sparse scatter: ranks disagree",
    ),
    "sparse from_local: channels": (lambda r: own_sites(r, torch.zeros(1, r.pick(1, 2))), "sparse from_local: ranks"),
    "sparse from_local: dtype": (
        lambda r: own_sites(r, torch.zeros(1, 1, dtype=r.pick(None, torch.half))),
        "from_local: r",
    ),
    "sparse from_local: batch": (lambda r: own_sites(r, torch.zeros(1, 1), r.pick(1, 2)), "sparse from_local: ranks"),
    "sparse from_local: cuts": (
        lambda r: own_sites(r, torch.zeros(1, 1), shift=-int(r.odd)),
        "sparse from_local: ranks disagree",
    ),
    "sparse from_local: rows": (lambda r: own_sites(r, torch.zeros(r.pick(1, 2), 1)), r"\(on rank"),
    "sparse from_local: foreign site": (lambda r: own_sites(r, torch.zeros(1, 1), site=0), "are not in its box"),
    "rule: example": (
        lambda r: dc.check_rule(dc.rule(x=dc.Window(1))(doubled), [normal(1, 1, 9) + r.odd], r.comm),
        "example of doubled: ranks disagree",
    ),
}


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def cloud(
    r: Rank,
    at: int = 2,
    dtype: Any = None,
    channels: int = 1,
    samples: int = 1,
    stride: int = 1,
    partition: Any = None,
) -> SparseTensor:
    coords = torch.tensor([[0, 0], [0, at], [0, 8]])
    x = SparseTensor(coords, torch.zeros(3, channels, dtype=dtype), stride, batch_size=samples)
    return sparse.scatter(x, grid_over(r.comm, w=r.size), partition)


def of_other(r: Rank, shift: int = 0) -> Any:
    return sparse.Partition(grid_over(r.comm, w=r.size), ((), tuple(range(1 + shift, r.size + shift))))


def own_sites(r: Rank, features: torch.Tensor, samples: int = 1, site: int | None = None, shift: int = 0) -> object:
    at = r.comm.rank if site is None or not r.odd else site
    return sparse.from_local(torch.tensor([[0, at]]), features, of_other(r, shift), samples)


@pytest.mark.fault(3, 16, 17, 23, 26, 30)
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_and_models(rank: Rank, name: str) -> None:
    check(rank, *TENSORS[name])


# -- values that one rank alone has ---------------------------------------------------------------------------------

WHOLE, ONES = torch.arange(18).reshape(2, 9), torch.ones(2, 9, dtype=torch.int64)
WEIGHTS = normal(5, 2)

VALUES: dict[str, Case] = {
    **{
        f"{name} 0": (lambda r, f=function: f(r.split(WHOLE), r.last(ONES, 0)), r"ZeroDivisionError.*\(on rank")
        for name, function in {
            "//": operator.floordiv,
            "%": operator.mod,
            "fmod": torch.fmod,
            "7 //": lambda _, y: 7 // y,
            "7 %": lambda _, y: 7 % y,
            "//=": operator.ifloordiv,
            "remainder_": torch.Tensor.remainder_,
            "trunc": partial(torch.div, rounding_mode="trunc"),
            "floor_divide out=": lambda x, y: torch.floor_divide(x, y, out=torch.zeros_like(x)),
        }.items()
    },
    "bernoulli": (lambda r: torch.bernoulli(r.last(normal(2, 9).sigmoid(), 2.0)), r"p_in"),
    "binary cross entropy": (
        lambda r: F.binary_cross_entropy(r.last(normal(2, 9).sigmoid(), 1.5), r.split(normal(2, 9).sigmoid())),
        "between 0 and 1",
    ),
    "cholesky": (
        lambda r: torch.linalg.cholesky(
            dc.scatter(
                torch.eye(3).repeat(r.size, 1, 1) * torch.tensor([1.0] * (r.size - 1) + [-1.0]).view(-1, 1, 1),
                dc.Distribution(r.grid, ("h", None, None)),
            )
        ),
        "positive-definite",
    ),
    "embedding": (lambda r: F.embedding(r.last(ONES, 5), WEIGHTS), "index out of range"),
    "cross entropy": (
        lambda r: F.cross_entropy(r.split(normal(1, 3, 9)), r.last(ONES[:1], 3)),
        "3",
    ),
    "one_hot": (lambda r: F.one_hot(r.last(ONES, 5), 5), "."),
    "index": (
        lambda r: dc.scatter(normal(9), grid_over(r.comm, n=r.size))[r.last(ONES, 9)],
        "index 9 is out of bounds",
    ),
    "index_select": (lambda r: r.split(normal(2, 9)).index_select(0, r.last(ONES[0], 2)), "index 2 is out of bounds"),
    "gather": (lambda r: torch.gather(r.split(normal(2, 9)), 0, r.last(ONES, 2)), "index 2 is out of bounds"),
    "scatter": (lambda r: torch.scatter(r.split(normal(2, 9)), 0, r.last(ONES, 2), 1.0), "index 2 is out of bounds"),
    "index_add": (
        lambda r: r.split(normal(2, 9)).index_add(1, r.last(ONES[0], 9), r.split(normal(2, 9))),
        "index 9 is out of bounds",
    ),
    "max_unpool2d": (
        lambda r: F.max_unpool2d(r.split(normal(1, 1, 2, 9)), r.last(torch.arange(18).view(1, 1, 2, 9), 999), 2),
        "999",
    ),
}


@pytest.mark.cpu
@pytest.mark.fault(92)
@pytest.mark.parametrize("name", VALUES)
def test_values_that_torch_checks(rank: Rank, name: str) -> None:
    check(rank, *VALUES[name])


# -- random numbers, and every call where all of them are compared ----------------------------------------------------


def generator(r: Rank) -> torch.Generator:
    return torch.Generator().manual_seed(r.pick(0, 1))


def seeded(r: Rank) -> None:
    torch.manual_seed(r.pick(0, 1))


DRAWN: dict[str, Callable[[Rank, dc.DistTensor], object]] = {
    "dropout": lambda r, x: [seeded(r), F.dropout(x, 0.5)],
    "rand_like": lambda r, x: [seeded(r), torch.rand_like(x)],
    "poisson of full tensors": lambda r, x: [seeded(r), torch.poisson(x)],
    "poisson of full tensors, a generator": lambda r, x: torch.poisson(x, generator(r)),
    "multinomial of full tensors, a generator": lambda r, x: torch.multinomial(x, 2, generator=generator(r)),
    "bernoulli, a generator": lambda r, x: torch.bernoulli(x, generator=generator(r)),
    "uniform_, a generator": lambda r, x: x.clone().uniform_(generator=generator(r)),
    "normal_, a generator": lambda r, x: x.clone().normal_(generator=generator(r)),
}


@pytest.mark.filterwarnings("ignore::distconv.errors.ReplicationWarning")
@pytest.mark.parametrize("name", DRAWN)
def test_generators(rank: Rank, fallback: None, name: str) -> None:
    x = rank.split(normal(4, 9).sigmoid())
    check(rank, lambda r: DRAWN[name](r, x), "random generator: ranks disagree.*seed all ranks alike")


CALLS: dict[str, Callable[[Rank, dc.DistTensor], object]] = {
    "operator": lambda r, x: r.pick(torch.exp, torch.sin)(x),
    "float": lambda r, x: x * r.pick(1.5, 2.5),
    "int": lambda r, x: torch.roll(x, r.pick(1, 2), 0),
    "bool": lambda r, x: x.sum(1, keepdim=r.pick(True, False)),
    "complex": lambda r, x: x * r.pick(1j, 2j),
    "str": lambda r, x: torch.div(x, 2.0, rounding_mode=r.pick("floor", "trunc")),
    "slice": lambda r, x: x[: r.pick(1, 2)],
    "number of NumPy": lambda r, x: x * r.pick(np.float32(1.5), np.float32(2.5)),
    "array's value": lambda r, x: x[:, np.array([0, r.pick(1, 2)])],
    "array's shape": lambda r, x: x[:, np.zeros(r.pick(1, 2), int)],
    "array's dtype": lambda r, x: x[np.zeros(4, r.pick(np.int64, np.int32))],
    "plain value": lambda r, x: x + torch.full((9,), r.pick(1.0, 2.0)),
    "plain shape": lambda r, x: x + torch.zeros(r.pick((9,), (1, 9))),
    "plain dtype": lambda r, x: x + torch.zeros(9, dtype=r.pick(torch.float32, torch.float64)),
    "parameter": lambda r, x: F.linear(x, nn.Parameter(torch.full((2, 9), r.pick(1.0, 2.0)))),
    "shape": lambda r, x: r.pick(x, x[:2]).exp(),
    "dtype": lambda r, x: r.pick(x, x.float()).exp(),
    "layout": lambda r, x: r.pick(x, x.redistribute(x.dist.replicate())).exp(),
    "layout to be": lambda r, x: x.redistribute(r.pick(dc.Distribution(r.grid, ("h", None)), x.dist.replicate())),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_operators_where_all_calls_are_compared(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(agreement, "level", "all")
    grid = dc.ProcessGrid(rank.comm, h=rank.size)
    x = dc.scatter(normal(4, 9), dc.Distribution(grid, (None, "h")))
    check(rank, lambda r: CALLS[name](r, x), "ranks (disagree|are at different operations)")
    grid.free()


# -- data, files and checkpoints --------------------------------------------------------------------------------------


FIELD = Field("x", "nch")


def loader(batch: int = 2, field: Field = FIELD, **options: Any) -> Callable[[Rank], object]:
    return lambda r: Loader(computed(r), [r.pick(FIELD, field)], r.grid, r.pick(2, batch), **r.pick({}, options))


def samples(path: str = "a.h5", count: int = 4, dtype: str = "f4", column: Any = None) -> str:
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((count, 2, 5), dtype)
        if column is not None:
            file["family"] = column
    return path


def seen(**other: Any) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        return open_source(samples(**r.pick({}, other)), ["x"], r.comm).close()

    return call


def written(change: Callable[[], object]) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        samples()
        r.pick(lambda: None, change)()
        return open_source("a.h5", {"x": Layout("f", (None, 2, None))}, r.comm).close()

    return call


def zeros(name: str, box: tuple[slice, ...], dtype: Any = "f4") -> Any:
    return np.zeros([s.stop - s.start for s in box], dtype)


def fails(name: str, box: tuple[slice, ...]) -> Any:
    raise ValueError("no such sample")


def computed(r: Rank, read: Any = zeros, shape: tuple[int, ...] = (4, 2, 5)) -> BoxFunction:
    return BoxFunction({"x": shape}, read, r.comm)


def column(readers: int) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        path = samples(column=r.pick(np.zeros(4, np.int16), np.zeros(8, np.int8)))
        with open_source(path, ["x"], r.comm, readers=readers) as file:
            return file.column("family")

    return call


def state(**other: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight": torch.ones(2, 2), "bias": torch.ones(2), **other}


def weights(other: Callable[[], object], call: Callable[[Rank], object] | None = None) -> Callable[[Rank], object]:
    def run(r: Rank) -> object:
        torch.save(r.pick(state, other)(), "w.pt")
        return call(r) if call else read_weights(Path("w.pt"), r.comm)

    return run


def replaced() -> None:
    Path("a.h5").unlink()
    Path("a.h5").mkdir()


FILES: dict[str, Case] = {
    "write: name": (lambda r: dc.write(r.split(counting(4, 6)), "o.zarr", r.pick("x", "y")), "o.zarr: ranks disagree"),
    "write: path": (lambda r: dc.write(r.split(counting(4, 6)), r.pick("o.zarr", "p.zarr"), "x"), "ranks (dis|are at)"),
    "write: ending": (
        lambda r: dc.write(r.split(counting(4, 6)), r.pick("o.zarr", "o.txt"), "x"),
        "ranks (dis|are at)",
    ),
    "write: no name": (
        lambda r: dc.write(r.split(counting(4, 6)), "o.zarr", r.pick("x", "")),
        "o.zarr: ranks disagree",
    ),
    "open: path": (lambda r: open_source(r.pick("a.h5", "b.h5"), ["x"], r.comm), "open_source: ranks disagree"),
    "open: paths": (lambda r: open_source(["a.h5", r.pick("b.h5", "c.h5")], ["x"], r.comm), "open_source: ranks dis"),
    "open: one_each": (lambda r: open_source(["a.h5"], ["x"], r.comm, one_each=r.odd), "open_source: ranks disagree"),
    "open: readers": (
        lambda r: open_source(samples(), ["x"], r.comm, readers=1 + r.odd),
        "open_source: ranks disagree",
    ),
    "open: names": (lambda r: open_source(samples(), r.pick(["x"], ["y"]), r.comm), "ranks disagree"),
    "open: no names": (lambda r: open_source(samples(), r.pick(["x"], []), r.comm), "open_source"),
    "open: list of files": (
        lambda r: [samples(), r.odd and samples("b.h5"), open_source("*.h5", ["x"], r.comm)],
        "the files: ranks disagree",
    ),
    "seen: samples": (seen(count=5), "as each rank sees it: ranks disagree"),
    "seen: dtype": (seen(dtype="i4"), "as each rank sees it: ranks disagree"),
    "seen: bytes": (seen(column=np.zeros(4)), "as each rank sees it: ranks disagree"),
    "seen: no file": (written(lambda: Path("a.h5").unlink()), r"a\.h5.*\(on rank"),
    "seen: a folder": (written(replaced), r"a\.h5.*\(on rank"),
    "seen: no HDF5": (written(lambda: Path("a.h5").write_text("text")), r"a\.h5.*\(on rank"),
    "seen: no dataset": (written(lambda: h5py.File("a.h5", "w").close()), r"no dataset 'x'.*\(on rank"),
    "seen: another layout": (written(lambda: samples(dtype="i4")), r"dataset 'x' .*\(on rank"),
    "column": (column(1), r"family.*\(on rank"),
    "column read by processes": (column(2), r"family.*\(on rank"),
    "function: shapes": (lambda r: computed(r, shape=r.pick((4, 2), (5, 2))), "BoxFunction: ranks disagree"),
    "function: dtype": (
        lambda r: computed(r, r.pick(zeros, partial(zeros, dtype="f8"))).dtype("x"),
        "dtype of 'x': ranks disagree",
    ),
    "function: fails": (lambda r: computed(r, r.pick(zeros, fails)).dtype("x"), r"no such sample.*\(on rank"),
    "resizing: sizes": (lambda r: Resized(computed(r), {"x": r.pick((3,), (4,))}), "resizing: ranks disagree"),
    "resizing: nearest": (
        lambda r: Resized(computed(r), {"x": (3,)}, nearest=r.pick((), ("x",))),
        "resizing: ranks disagree",
    ),
    "processes: readers": (lambda r: ReadByProcesses(computed(r), 1 + r.odd), "reading processes: ranks disagree"),
    "processes: a closure": (
        lambda r: ReadByProcesses(computed(r, r.pick(slow, lambda *_: 0)), 1),
        r"cannot be sent to reading processes.*\(on rank",
    ),
    "loader: batch": (loader(batch=3), "Loader: ranks disagree"),
    "loader: no batch": (loader(batch=0), "Loader: ranks disagree"),
    "loader: dataset": (loader(field=Field("y", "nch")), "Loader: ranks disagree"),
    "loader: scale": (loader(field=Field("x", "nch", scale=2)), "Loader: ranks disagree"),
    "loader: seed": (loader(seed=1), "Loader: ranks disagree"),
    "loader: shuffle": (loader(shuffle=False), "Loader: ranks disagree"),
    "loader: drop_last": (loader(drop_last=True), "Loader: ranks disagree"),
    "loader: mirror": (loader(mirror="h"), "Loader: ranks disagree"),
    "loader: transpose": (loader(transpose=True), "Loader: ranks disagree"),
    "loader: crop": (loader(crop={"h": 4}), "Loader: ranks disagree"),
    "loader: epoch": (
        lambda r: next(Loader(computed(r), [FIELD], r.grid, 2).epoch(r.pick(0, 1))),
        "epoch of a Loader: ranks disagree",
    ),
    "loader: step": (
        lambda r: next(Loader(computed(r), [FIELD], r.grid, 2).epoch(0, start=r.pick(0, 1))),
        "epoch of a Loader: ranks disagree",
    ),
    "moments: dataset": (lambda r: moments(computed(r), r.pick("x", "y")), "moments: ranks disagree"),
    "moments: channels": (lambda r: moments(computed(r), "x", channels=not r.odd), "moments: ranks disagree"),
    "moments: fails": (
        lambda r: moments(computed(r, lambda *_: r.pick(zeros, fails)(*_)), "x"),
        r"no such sample.*\(on rank",
    ),
    "weights: shape": (weights(lambda: state(weight=torch.ones(4))), "w.pt: ranks disagree"),
    "weights: dtype": (weights(lambda: state(weight=torch.ones(2, 2).view(torch.int32))), "w.pt: ranks disagree"),
    "weights: a value": (weights(lambda: state(weight=torch.full((2, 2), 2.0))), "w.pt: ranks disagree"),
    "weights: names": (weights(lambda: {"weight": torch.ones(2, 2), "other": torch.ones(2)}), "w.pt: ranks disagree"),
    "weights: an entry": (weights(lambda: {"weight": torch.ones(2, 2)}), "w.pt: ranks disagree"),
    "weights: no state_dict": (weights(lambda: [1]), r"holds list; .*\(on rank"),
    "weights: another model": (
        weights(
            state,
            lambda r: load_weights(nn.Linear(2, r.pick(2, 3)), Path("w.pt"), r.comm),
        ),
        r"the weights do not fit.*\(on rank",
    ),
    "checkpoint saved: folder": (
        lambda r: dc.save_checkpoint(r.pick("a", "b"), 1, with_weight(len), comm=r.comm),
        "sav",
    ),
    "checkpoint saved: step": (
        lambda r: dc.save_checkpoint("a", r.pick(1, 2), with_weight(len), comm=r.comm),
        "step 2 in",
    ),
    "checkpoint saved: a value of no kind": (
        lambda r: dc.save_checkpoint("a", 1, with_weight(len), comm=r.comm, values=r.pick({}, 3)),
        "values is a int",
    ),
    "checkpoint loaded: folder": (
        lambda r: dc.load_checkpoint(r.pick("a", "b"), with_weight(len), comm=r.comm),
        "load",
    ),
    **{
        f"checkpoint loaded: {option}": (
            lambda r, o=option: dc.load_checkpoint(
                "a", with_weight(len), comm=r.comm, **r.pick({}, {o: o != "strict"})
            ),
            "load_checkpoint: ranks disagree",
        )
        for option in ("strict", "convert_dtype", "fallback", "missing_ok")
    },
    "plan file": (
        lambda r: [dc.Plan({"*": {"h": r.pick(1, 2)}}).save("p.json"), dc.Plan.load("p.json", r.comm)],
        "plan: ranks disagree",
    ),
    "plan file is not there": (
        lambda r: [r.odd or dc.Plan({"*": {"h": 1}}).save("p.json"), dc.Plan.load("p.json", r.comm)],
        r"p\.json.*\(on rank",
    ),
    "pipeline plan file": (lambda r: PipelinePlan.load(r.pick("a", "b"), r.comm), r"\(on rank"),
}


@pytest.mark.parametrize("name", FILES)
def test_data_and_files(rank: Rank, name: str) -> None:
    check(rank, *FILES[name])


# -- pipelines and scans ----------------------------------------------------------------------------------------------
USUAL = partial(nn.Linear, 2, 2)


def pipeline(layer: Callable[[], nn.Module] = USUAL, **other: Any) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        stages = [nn.Linear(2, 2) for _ in range(r.size - 1)] + [r.pick(USUAL, layer)()]
        return Pipeline(stages, r.comm, **{"schedule": "gpipe", "loss": F.mse_loss, **r.pick({}, other)})

    return call


def switched(**other: Any) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        given = {"schedule": "gpipe", "microbatches": 2}
        with Pipeline([nn.Linear(2, 2) for _ in range(r.size)], r.comm, "stale", F.mse_loss) as pipe:
            return pipe.switch(**given | r.pick({}, other))

    return call


def scan(method: str = "linear", depth: Any = None, **other: Any) -> Callable[[Rank], object]:
    def call(r: Rank) -> object:
        kind, width = (r.pick(usual, other.get(name, usual)) for name, usual in (("dtype", None), ("width", 3)))
        return backpropagate(
            torch.ones(2, 3) if r.comm.rank == 0 else None,
            other["jacobians"] if r.odd and "jacobians" in other else torch.ones(2, 2, width, width, dtype=kind),
            r.pick("linear", method),
            r.comm,
            depth=r.pick(None, depth),
        )

    return call


OVER_STAGES: dict[str, Case] = {
    "schedule": (pipeline(schedule="1f1b-sno"), "Pipeline's arguments: ranks disagree"),
    "microbatches": (pipeline(microbatches=3), "Pipeline's arguments: ranks disagree"),
    "replicas": (pipeline(replicas=2), "Pipeline's arguments: ranks disagree"),
    "weights": (pipeline(weights="recompute"), "Pipeline's arguments: ranks disagree"),
    "batch norm": (pipeline(batch_norm="deferred"), "Pipeline's arguments: ranks disagree"),
    "plans": (pipeline(plans=[None, None]), "Pipeline's arguments: ranks disagree"),
    "options": (pipeline(delay=1), "Pipeline's arguments: ranks disagree"),
    "stage: class": (pipeline(partial(nn.Bilinear, 2, 2, 2)), "Pipeline's stages: ranks disagree"),
    "stage: no module": (pipeline(lambda: torch.tanh), "Pipeline's stages: ranks disagree"),
    "stage: shape": (pipeline(partial(nn.Linear, 2, 3)), "Pipeline's stages: ranks disagree"),
    "stage: dtype": (pipeline(partial(nn.Linear, 2, 2, dtype=torch.float64)), "Pipeline's stages: ranks disagree"),
    "stage: a weight": (pipeline(lambda: with_weight(len)), "Pipeline: .* differ between ranks"),
    "loss": (pipeline(loss=3), "loss"),
    "optimizer": (pipeline(optimizer=3), "optimizer"),
    "switch: schedule": (switched(schedule="1f1b-sno"), "switch: ranks disagree"),
    "switch: microbatches": (switched(microbatches=3), "switch: ranks disagree"),
    "switch: weights": (switched(weights="recompute"), "switch: ranks disagree"),
    "switch: options": (switched(delay=1), "switch: ranks disagree"),
    "scan: method": (scan("blelloch"), "method of backpropagate: ranks disagree"),
    "scan: unknown method": (scan("other"), "backpropagate"),
    "scan: depth": (scan(depth=1), "method of backpropagate: ranks disagree"),
    "scan: dtype": (scan(dtype=torch.float64), "values on rank"),
    "scan: width": (scan(width=4), "takes gradients of 4"),
    "scan: no Jacobians": (scan(jacobians=None), r"NoneType.*\(on rank"),
}


@pytest.mark.parametrize("name", OVER_STAGES)
def test_pipelines_and_scans(rank: Rank, name: str) -> None:
    check(rank, *OVER_STAGES[name])
