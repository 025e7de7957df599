"""A module, its optimizer and the random numbers come back as they were, or all differences are listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

import distconv as dc
from distconv import checkpoint
from distconv.checkpoint import reading
from distconv.checkpoint.manifest import MANIFEST, read
from distconv.checkpoint.state import Loaded
from tests.distconv.checkpoint.damage import on_rank_0, only_file, refused
from tests.distconv.layouts import grid_over, normal

pytestmark = pytest.mark.ranks(1, 2, 4)


def network(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, width, 3), nn.BatchNorm2d(width), nn.Dropout(0.5), nn.Conv2d(width, 1, 3)
    ).double()


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return torch.optim.Adam(model.parameters(), 0.01)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = (model(torch.randn(2, 2, 8, 8, dtype=torch.float64)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_each_rank_goes_on_with_its_own_random_numbers_and_others_with_those_of_rank_0(
    comm: Any, shared_tmp_path: Path
) -> None:
    model = network()
    torch.manual_seed(7 + comm.rank)
    folder = dc.save_checkpoint(shared_tmp_path, 1, model, comm=comm)
    expected = torch.rand(4)
    everywhere = comm.allgather(expected.tolist())
    assert len(set(map(tuple, everywhere))) == comm.size
    torch.manual_seed(99)
    dc.load_checkpoint(shared_tmp_path, network(), comm=comm)
    assert torch.equal(torch.rand(4), expected)
    # A job of another number of ranks.
    checkpoint.restore_state(checkpoint.load(folder, MPI.COMM_SELF), network(), None, MPI.COMM_SELF)
    assert torch.rand(4).tolist() == everywhere[0]


@pytest.mark.fault(64, 68)
def test_all_differences_from_the_model_are_listed(comm: Any, shared_tmp_path: Path) -> None:
    model = network()
    optimizer = optimizer_of("sgd", model)
    folder = checkpoint.save(shared_tmp_path, 5, *checkpoint.capture_state(model, optimizer, comm), comm)
    other = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 2, 3), nn.PReLU())
    found = checkpoint.load(folder, comm)
    text = refused(comm, lambda: checkpoint.restore_state(found, other, optimizer_of("sgd", other), comm))
    for part in (
        "'4.weight' is missing",
        "'3.weight' is torch.float64 (1, 4, 3, 3) in the checkpoint, torch.float32 (2, 4, 3, 3) in the model",
        "'3.bias' is torch.float64 (1,) in the checkpoint, torch.float32 (2,) in the model",
        "'1.running_mean' is torch.float64 (4,) in the checkpoint, torch.float32 (4,) in the model",
    ):
        assert part in text
    text = refused(comm, lambda: checkpoint.restore_state(found, network(), optimizer_of("adam", network()), comm))
    assert "is of SGD, not of Adam" in text


def on_grid(grid: dc.ProcessGrid, model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for number in range(count):
        x = dc.scatter(normal(4, 2, 8, 8, seed=number), grid)
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.fault(66, 67)
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("name", "before", "after"), [("adam", *"ch"), ("sgd", *"hc"), ("adam", *"cc"), ("sgd", *"nc")]
)
def test_a_users_own_loop_goes_on_on_another_grid(
    comm: Any, shared_tmp_path: Path, name: str, before: str, after: str
) -> None:
    grid = grid_over(comm, **{before: comm.size})
    model = dc.parallelize(network(8), grid)
    optimizer = optimizer_of(name, model)
    assert dc.load_checkpoint(shared_tmp_path, model, optimizer, comm=comm, missing_ok=True) is None
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    torch.manual_seed(7)
    on_grid(grid, model, optimizer, 2)
    dc.save_checkpoint(shared_tmp_path, 2, model, optimizer, {"schedule": schedule.state_dict()}, comm=comm)
    uninterrupted = on_grid(grid, model, optimizer, 5)
    other = grid_over(comm, **{after: comm.size})
    twin = dc.parallelize(network(8), other)
    for parameter in twin.parameters():
        parameter.data.zero_()
    twin_optimizer = optimizer_of(name, twin)
    found = dc.load_checkpoint(shared_tmp_path, twin, twin_optimizer, comm=comm)
    assert found == (2, {"schedule": schedule.state_dict()}, (), (), ())
    again = on_grid(other, twin, twin_optimizer, 5)
    assert again == pytest.approx(uninterrupted, rel=1e-11)
    if before == after:
        assert again == uninterrupted


@pytest.mark.ranks(2, 4)
def test_sharded_weights_and_their_state_are_read_as_they_lie(comm: Any) -> None:
    model = dc.parallelize(network(8), grid_over(comm, c=comm.size))
    layout_of, weight = checkpoint.state.layout_resolver(model), model[0].weight
    assert isinstance(weight, dc.DistTensor)
    assert layout_of("model/0.weight", weight.shape) == layout_of("optimizer/0.weight/exp_avg", weight.shape)
    assert layout_of("model/0.weight", weight.shape) == weight.dist
    for name, shape in (("optimizer/0.weight/step", ()), ("model/0.weight", (1, 2, 3, 3)), ("random/torch", (2, 9))):
        assert layout_of(name, shape) is None


@pytest.mark.ranks(4)
def test_a_rank_reads_its_blocks_and_what_is_whole_and_no_more(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wide(grid: dc.ProcessGrid) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3))
        model = dc.parallelize(model, grid)
        return model, torch.optim.Adam(model.parameters())

    grid = grid_over(comm, c=comm.size)
    model, optimizer = wide(grid)
    model(dc.scatter(normal(2, 64, 8, 8, seed=1).float(), grid)).square().mean().backward()
    optimizer.step()
    folder = dc.save_checkpoint(shared_tmp_path, 1, model, optimizer, comm=comm)
    files = [entry["bytes"] for entry in read(folder)["files"].values()]
    read_bytes, counted = reading.read_bytes, []
    monkeypatch.setattr(reading, "read_bytes", lambda file, size: counted.append(size) or read_bytes(file, size))
    assert len(files) == comm.size + 1
    for axis in "ch":
        counted.clear()
        twin, twin_optimizer = wide(grid_over(comm, **{axis: comm.size}))
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        dc.load_checkpoint(shared_tmp_path, twin, twin_optimizer, comm=comm)
        # One of random numbers and counts, and one of its blocks.
        assert len(counted) == (2 if axis == "c" else comm.size + 1)
        assert sum(counted) < (0.3 * sum(files) if axis == "c" else sum(files) + 1)
        for name, weight in model.state_dict().items():
            assert torch.equal(twin.state_dict()[name], weight)
        for parameter, saved in zip(twin.parameters(), model.parameters(), strict=True):
            for key, state in optimizer.state[saved].items():
                assert torch.equal(dc.gather(twin_optimizer.state[parameter][key]), dc.gather(state)), key


@pytest.mark.fault(64)
def test_names_may_differ_where_that_is_asked_for_and_are_listed(comm: Any, shared_tmp_path: Path) -> None:
    model = network()
    optimizer = optimizer_of("adam", model)
    steps(model, optimizer, 1)
    dc.save_checkpoint(shared_tmp_path, 1, model, optimizer, comm=comm)
    other = nn.Sequential(*network()[:3], nn.Conv2d(4, 1, 3, bias=False), nn.PReLU()).double()
    slope, (weight, state) = other[4].weight.clone(), (model[0].weight, optimizer.state[model[0].weight])
    other_optimizer = optimizer_of("adam", other)
    text = refused(comm, lambda: dc.load_checkpoint(shared_tmp_path, other, other_optimizer, comm=comm))
    assert "2 differences: '4.weight' is missing; '3.bias' is not in the model" in text
    found = dc.load_checkpoint(shared_tmp_path, other, other_optimizer, comm=comm, strict=False)
    assert found is not None
    assert found.missing == ("model/4.weight",)
    moments = ("step", "exp_avg", "exp_avg_sq")
    assert found.unexpected == ("model/3.bias", *(f"optimizer/3.bias/{moment}" for moment in moments))
    assert torch.equal(other[0].weight, weight)
    assert torch.equal(other[4].weight, slope)
    assert torch.equal(other_optimizer.state[other[0].weight]["exp_avg"], state["exp_avg"])
    steps(other, other_optimizer, 1)
    # Of another optimizer nothing is taken.
    plain = optimizer_of("sgd", other)
    found = dc.load_checkpoint(shared_tmp_path, other, plain, comm=comm, strict=False)
    assert found is not None
    assert len([name for name in found.unexpected if name.startswith("optimizer/")]) == 6 * len(moments)
    assert not plain.state
    # Shapes may not.
    text = refused(comm, lambda: dc.load_checkpoint(shared_tmp_path, network(3), plain, comm=comm, strict=False))
    assert "'0.weight' is torch.float64 (4, 2, 3, 3) in the checkpoint, torch.float64 (3, 2, 3, 3) in the model" in text


@pytest.mark.fault(61, 62)
@pytest.mark.parametrize("damage", ["bit", "gone", "manifest"])
def test_the_newest_whole_one_is_taken_where_that_is_asked_for(comm: Any, shared_tmp_path: Path, damage: str) -> None:
    model = network()
    optimizer = optimizer_of("sgd", model)
    weights = []
    for step in (1, 2, 3):
        steps(model, optimizer, 1)
        weights.append(model[0].weight.clone())
        folder = dc.save_checkpoint(shared_tmp_path, step, model, optimizer, {"of": step}, comm=comm, keep=3)
    comm.Barrier()
    path = folder / MANIFEST if damage == "manifest" else only_file(folder)
    content = path.read_bytes()
    flipped = content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 4]) + content[len(content) // 2 + 1 :]
    comm.Barrier()
    if damage == "gone":
        on_rank_0(comm, path.unlink)
    else:
        on_rank_0(comm, lambda: path.write_bytes(flipped))
    text = refused(comm, lambda: dc.load_checkpoint(shared_tmp_path, model, optimizer, comm=comm))
    assert str(folder) in text
    assert damage == "gone" or "is damaged" in text
    found = dc.load_checkpoint(shared_tmp_path, model, optimizer, comm=comm, fallback=True)
    assert found is not None
    assert (found.step, found.values, len(found.skipped)) == (2, {"of": 2}, 1)
    assert str(folder) in found.skipped[0]
    assert torch.equal(model[0].weight, weights[1])
    comm.Barrier()
    on_rank_0(comm, lambda: [each.write_bytes(b"") for each in shared_tmp_path.glob(f"*/{MANIFEST}")])
    text = refused(comm, lambda: dc.load_checkpoint(shared_tmp_path, model, optimizer, comm=comm, fallback=True))
    assert f"all checkpoints in {shared_tmp_path} are damaged" in text


@pytest.mark.fault(81)
def test_a_folder_without_any_is_an_error_unless_that_is_allowed(comm: Any, shared_tmp_path: Path) -> None:
    model = network()
    optimizer = optimizer_of("sgd", model)

    def told(folder: Path) -> str:
        return refused(comm, lambda: dc.load_checkpoint(folder, model, optimizer, comm=comm))

    assert "nothere: there is no such folder. To start without a checkpoint" in told(shared_tmp_path / "nothere")
    assert dc.load_checkpoint(shared_tmp_path / "nothere", model, optimizer, comm=comm, missing_ok=True) is None
    folder = dc.save_checkpoint(shared_tmp_path, 3, model, optimizer, comm=comm)
    comm.Barrier()
    assert f"it is one itself; name {shared_tmp_path}" in told(folder)
    on_rank_0(comm, (folder / MANIFEST).unlink)
    assert "step-000003 was never finished" in told(shared_tmp_path)


def test_an_optimizer_may_be_left_out(comm: Any, shared_tmp_path: Path) -> None:
    model, twin = network(), network()
    optimizer = optimizer_of("adam", model)
    steps(model, optimizer, 1)
    dc.save_checkpoint(shared_tmp_path / "with", 1, model, optimizer, comm=comm)
    found = dc.load_checkpoint(shared_tmp_path / "with", twin, comm=comm)
    assert found is not None
    assert "optimizer/0.weight/exp_avg" in found.unexpected
    assert torch.equal(twin[0].weight, model[0].weight)
    dc.save_checkpoint(shared_tmp_path / "without", 1, model, comm=comm)
    assert dc.load_checkpoint(shared_tmp_path / "without", twin, comm=comm) == (1, {}, (), (), ())
    other = optimizer_of("adam", twin)
    text = refused(comm, lambda: dc.load_checkpoint(shared_tmp_path / "without", twin, other, comm=comm))
    assert "checkpoint of step 1 was saved without an optimizer; load it without, or with strict=False" in text
    assert dc.load_checkpoint(shared_tmp_path / "without", twin, other, comm=comm, strict=False) is not None


@pytest.mark.fault(83)
@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda: 1, "value 'user'['x'] is a builtins.function, which JSON cannot represent"),
        ({1, 2}, "value 'user'['x'] is a builtins.set, which JSON cannot represent"),
        ([0.0, b"x"], "value 'user'['x'][1] is a builtins.bytes, which JSON cannot represent"),
    ],
)
def test_a_value_that_json_cannot_carry_is_named(comm: Any, shared_tmp_path: Path, value: object, why: str) -> None:
    model = network()
    assert why in refused(comm, lambda: dc.save_checkpoint(shared_tmp_path, 1, model, values={"x": value}, comm=comm))
    layer = nn.Sequential(Counting(2, 2))
    layer[0].seen = {"x": value}
    why = why.replace("'user'", "'extra_state'['0._extra_state']")
    assert why in refused(comm, lambda: dc.save_checkpoint(shared_tmp_path, 1, layer, comm=comm))


@pytest.mark.fault(84)
def test_values_that_the_models_dtype_cannot_hold_are_refused(comm: Any, shared_tmp_path: Path) -> None:
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight[0, 0] = 1e300
    dc.save_checkpoint(shared_tmp_path / "large", 1, model, comm=comm)
    dc.save_checkpoint(shared_tmp_path / "complex", 1, nn.Linear(2, 1, dtype=torch.complex64), comm=comm)
    small = nn.Linear(2, 1).float()
    for kind, why in (
        ("large", "'weight' has values of torch.float64 that torch.float32 cannot hold"),
        ("complex", "'weight' is torch.complex64 (1, 2) in the checkpoint, torch.float32 (1, 2) in the model"),
    ):
        place = shared_tmp_path / kind
        text = refused(comm, lambda place=place: dc.load_checkpoint(place, small, comm=comm, convert_dtype=True))
        assert why in text


def test_a_checkpoint_of_another_model_is_refused_before_its_tensors_are_read(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dc.save_checkpoint(shared_tmp_path, 1, nn.Linear(100, 100), comm=comm)
    monkeypatch.setattr(reading, "read_bytes", None)
    text = refused(comm, lambda: dc.load_checkpoint(shared_tmp_path, nn.Linear(3, 4), comm=comm, fallback=True))
    assert "'weight' is torch.float32 (100, 100) in the checkpoint, torch.float32 (4, 3) in the model" in text


class Counting(nn.Linear):
    """A layer with state of its own that is not a tensor."""

    seen: Any = None

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@pytest.mark.parametrize(
    "state", [{"count": 3, 4: [1.5, None], "mean": torch.arange(3.0)}, torch.arange(2), None, "text", float("inf")]
)
def test_extra_state_of_modules_comes_back(comm: Any, shared_tmp_path: Path, state: Any) -> None:
    torch.manual_seed(0)
    model, twin = (nn.Sequential(Counting(2, 2), nn.ReLU()) for _ in range(2))
    model[0].seen = state
    twin[0].seen = torch.zeros(2, dtype=torch.int64) if isinstance(state, torch.Tensor) else 0
    dc.save_checkpoint(shared_tmp_path, 1, model, comm=comm)
    found = dc.load_checkpoint(shared_tmp_path, twin, comm=comm)
    assert found is not None and found.missing == found.unexpected == ()
    if isinstance(state, str):
        assert twin[0].seen == state
    else:
        torch.testing.assert_close(twin[0].seen, state, rtol=0, atol=0)
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert "0._extra_state" in refused(comm, lambda: dc.load_checkpoint(shared_tmp_path, plain, comm=comm))
    found = dc.load_checkpoint(shared_tmp_path, plain, comm=comm, strict=False)
    assert found is not None and found.unexpected == ("model/0._extra_state",)
    dc.save_checkpoint(shared_tmp_path, 2, plain, comm=comm)
    assert "0._extra_state" in refused(comm, lambda: dc.load_checkpoint(shared_tmp_path, twin, comm=comm))
    found = dc.load_checkpoint(shared_tmp_path, twin, comm=comm, strict=False)
    assert found is not None and found.missing == ("model/0._extra_state",)


def test_names_of_parameters_may_have_slashes(comm: Any, shared_tmp_path: Path) -> None:
    def named(value: float) -> nn.Module:
        model = nn.Module()
        for index, name in enumerate(("t", "t/850", "t/850/exp_avg", "a//b", "a/b")):
            model.register_parameter(name, nn.Parameter(torch.full((2,), value * (index + 1))))
        return model

    model, twin = named(1.0), named(0.0)
    optimizers = [torch.optim.Adam(each.parameters()) for each in (model, twin)]
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizers[0].step()
    dc.save_checkpoint(shared_tmp_path, 1, model, optimizers[0], comm=comm)
    dc.load_checkpoint(shared_tmp_path, twin, optimizers[1], comm=comm)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(optimizers[0].state[one]["exp_avg"], optimizers[1].state[other]["exp_avg"])


@pytest.mark.parametrize("now", [torch.tensor(0.5), 0.5])
def test_a_learning_rate_may_be_a_tensor(comm: Any, shared_tmp_path: Path, now: Any) -> None:
    model, twin = network(), network()
    saved = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.3), betas=(0.5, 0.75))
    steps(model, saved, 1)
    dc.save_checkpoint(shared_tmp_path, 1, model, saved, comm=comm)
    found = torch.optim.Adam(twin.parameters(), lr=now)
    dc.load_checkpoint(shared_tmp_path, twin, found, comm=comm)
    rate = found.param_groups[0]["lr"]
    assert type(rate) is type(now) and float(rate) == float(torch.tensor(0.3))
    assert found.param_groups[0]["betas"] == (0.5, 0.75)
    dc.save_checkpoint(shared_tmp_path, 2, twin, found, comm=comm)
    dc.load_checkpoint(shared_tmp_path, model, saved, comm=comm)
    assert torch.equal(saved.param_groups[0]["lr"], torch.tensor(0.3))


def test_lbfgs_goes_on_as_if_nothing_had_happened(comm: Any, shared_tmp_path: Path) -> None:
    def closures(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
        x = normal(4, 2, 8, 8, seed=3)

        def closure() -> float:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss.item()

        return [optimizer.step(closure) for _ in range(count)]  # type: ignore[arg-type, misc]

    def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=4)

    model, twin = network().eval(), network().eval()
    optimizer, other = lbfgs(model), lbfgs(twin)
    closures(model, optimizer, 2)
    dc.save_checkpoint(shared_tmp_path, 1, model, optimizer, comm=comm)
    expected = closures(model, optimizer, 3)
    dc.load_checkpoint(shared_tmp_path, twin, other, comm=comm)
    assert closures(twin, other, 3) == expected


@pytest.mark.ranks(2)
def test_tensors_among_values_come_back_whole_on_any_grid(comm: Any, shared_tmp_path: Path) -> None:
    model = dc.parallelize(network(), grid_over(comm, c=2))
    average = {name: parameter.detach().clone() * 2 for name, parameter in model.named_parameters()}
    assert any(isinstance(each, dc.DistTensor) for each in average.values())
    values = {"ema": average, "bits": [torch.tensor([1.5, float("nan")]).bfloat16(), torch.tensor(True)], "n": 1}
    dc.save_checkpoint(shared_tmp_path, 1, model, values=values, comm=comm)
    twin = dc.parallelize(network(), grid_over(comm, h=2))
    found = dc.load_checkpoint(shared_tmp_path, twin, comm=comm)
    assert found is not None and found.values["n"] == 1 and found.unexpected == ()
    for name, weight in network().state_dict().items():
        if name in average:
            assert torch.equal(found.values["ema"][name], weight * 2)
    half, flag = found.values["bits"]
    torch.testing.assert_close(half, values["bits"][0], rtol=0, atol=0, equal_nan=True)  # type: ignore[index]
    assert torch.equal(flag, torch.tensor(True))


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.eye(3).to_sparse(), "'values/0' is torch.sparse_coo. Save it as a dense tensor"),
        (torch.zeros(2, device="meta"), "'values/0' is on the meta device"),
    ],
)
def test_tensors_without_plain_values_are_refused(
    comm: Any, shared_tmp_path: Path, tensor: torch.Tensor, why: str
) -> None:
    model = network()
    assert why in refused(comm, lambda: dc.save_checkpoint(shared_tmp_path, 1, model, values={"x": tensor}, comm=comm))
    text = refused(comm, lambda: dc.save_checkpoint(shared_tmp_path, 1, model, values=[tensor], comm=comm))  # type: ignore[arg-type]
    assert "values is a list. Pass a dictionary" in text


def test_a_checkpoint_that_fits_lists_no_tensors_and_no_errors():
    assert Loaded(3, {"lr": 0.1}) == (3, {"lr": 0.1}, (), (), ())
