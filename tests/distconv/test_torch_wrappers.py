"""torch's own wrappers for data parallelism around parallelized models: right gradients, or one error on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DataParallel, DistributedDataParallel

import distconv as dc
from tests.distconv.layouts import normal, raises_everywhere

pytestmark = [
    pytest.mark.ranks(2, 3),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]


@pytest.fixture
def group(comm, shared_tmp_path: Path) -> Iterator[None]:
    store = f"file://{shared_tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=comm.rank, world_size=comm.size)
    yield
    torch.distributed.destroy_process_group()


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)
    ).double()


def losses(model: nn.Module, grid: dc.ProcessGrid | None = None) -> list[float]:
    x, labels = normal(5, 3, 7, 9), torch.arange(5 * 7 * 9).reshape(5, 7, 9) % 2
    given = (x, labels) if grid is None else (dc.scatter(x, grid), dc.scatter(labels, grid, dims="nhw"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = cross_entropy(model(given[0]), given[1])
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return found


def part_in_ddp(grid: dc.ProcessGrid) -> nn.Module:
    model = build()
    dc.parallelize(model[3], grid)
    return DistributedDataParallel(model)


def replicate(grid: dc.ProcessGrid) -> nn.Module:
    composable = pytest.importorskip("torch.distributed._composable.replicate")
    return composable.replicate(dc.parallelize(build(), grid))


REJECTED = {
    "after parallelize": lambda grid: DistributedDataParallel(dc.parallelize(build(), grid)),
    "before parallelize": lambda grid: dc.parallelize(DistributedDataParallel(build()), grid),
    "around a parallelized layer": part_in_ddp,
    "in a parallelized model": lambda grid: dc.parallelize(nn.Sequential(DistributedDataParallel(build())), grid),
    "replicate": replicate,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrapped", REJECTED.values(), ids=REJECTED)
def test_ddp_raises_at_the_first_forward_and_names_the_grid_to_use(comm, group, wrapped):
    grid = dc.ProcessGrid(comm, h=comm.size)
    text = raises_everywhere(
        comm, dc.UnsupportedOperation, "DistributedDataParallel", lambda: losses(wrapped(grid), grid)
    )
    assert f"dc.ProcessGrid(n={comm.size})" in text
    grid.free()


def fsdp(model: nn.Module) -> nn.Module:
    sharded = pytest.importorskip("torch.distributed.fsdp")
    return sharded.FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fully_shard(model: nn.Module) -> nn.Module:
    sharded = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(sharded, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    return sharded.fully_shard(model)


RIGHT = {
    "FSDP": fsdp,
    "fully_shard": fully_shard,
    "DataParallel on one device": DataParallel,
}


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", RIGHT.values(), ids=RIGHT)
def test_wrappers_of_a_parallelized_model_give_the_losses_of_one_process(comm, group, wrap):
    grid = dc.ProcessGrid(comm, h=comm.size)
    assert losses(wrap(dc.parallelize(build(), grid)), grid) == pytest.approx(losses(build()), rel=1e-11)
    grid.free()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", [fsdp, fully_shard])
def test_parallelize_of_a_model_that_fsdp_has_sharded_says_in_which_order_to_call_them(comm, group, wrap):
    grid = dc.ProcessGrid(comm, n=comm.size)
    raises_everywhere(
        comm, dc.UnsupportedOperation, "Call parallelize first", lambda: dc.parallelize(wrap(build()), grid)
    )
    grid.free()


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_weights_that_fsdp_has_sharded_raises(comm, group, shared_tmp_path):
    grid = dc.ProcessGrid(comm, n=comm.size)
    model = fully_shard(dc.parallelize(build(), grid))
    raises_everywhere(
        comm, dc.UnsupportedOperation, "is a DTensor", lambda: dc.save_checkpoint(shared_tmp_path / "run", 1, model)
    )
    grid.free()


def test_torch_distributed_functions_raise_instead_of_changing_a_copy(comm, group):
    grid = dc.ProcessGrid(comm, h=comm.size)
    x = dc.scatter(normal(2, 3, 7, 9), grid)
    raises_everywhere(
        comm, dc.UnsupportedOperation, "does not take a DistTensor", lambda: torch.distributed.all_reduce(x)
    )
    loss = x.square().mean()
    raises_everywhere(
        comm, dc.UnsupportedOperation, "already the same on all ranks", lambda: torch.distributed.all_reduce(loss)
    )
    grid.free()
