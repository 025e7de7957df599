"""Modules called, hooked, converted and wrapped in unusual ways; results as Python takes them."""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from tests.distconv.layouts import normal
from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom

# -- modules ----------------------------------------------------------------------------------------------------------


@idiom(quick=True)
def a_model_is_converted_after_it_was_spread(b: Bench) -> Found:
    """To single precision for a look, and back."""
    model = b.model.eval().float()
    head = model.head.weight
    told = [head.dtype is torch.float32, head.element_size() == 4, head.nbytes == 4 * head.numel()]
    y = model(b.images().float())
    y.sum().backward()
    told += [y.dtype is torch.float32, head.grad.dtype is torch.float32]
    b.optimizer.zero_grad()
    model.double().train()
    b.step()
    return b.state() | {"told": torch.tensor(told)}


@idiom()
def the_data_of_weights_is_converted(b: Bench) -> Found:
    for convert in (torch.Tensor.bfloat16, torch.Tensor.double):
        for p in b.model.parameters():
            p.data = convert(p.data)
    b.step()
    return b.state()


@idiom()
def hooks_change_named_arguments(b: Bench) -> Found:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 3, padding=1)

        def forward(self, x: torch.Tensor, *, scale: float = 1.0, skip: Any = None) -> torch.Tensor:
            y = self.conv(x) * scale
            return y if skip is None else y + skip

    def before(_: Any, args: Any, named: Any) -> Any:
        return args, {**named, "scale": 2 * named["scale"], "skip": args[0].mean(1, keepdim=True)}

    net = b.made(Scaled)
    net.register_forward_pre_hook(before, with_kwargs=True)
    net.register_forward_hook(lambda m, args, named, y: y * named["scale"], with_kwargs=True)
    y = net(b.images(), scale=0.5)
    y.square().mean().backward()
    return {"y": y} | b.gradients(net)


@idiom()
def weights_lie_in_lists_and_dicts(b: Bench) -> Found:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.ParameterDict({"w": nn.Parameter(torch.randn(6, 3, 3, 3)), "b": nn.Parameter(torch.randn(6))})
            self.gates = nn.ParameterList([torch.randn(1, 6, 1, 1) for _ in range(3)])
            self.layers = nn.ModuleDict({"norm": nn.BatchNorm2d(6), "head": nn.Conv2d(6, 5, 1)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.conv2d(x, self.own["w"], self.own["b"], padding=1)
            for gate in self.gates:
                y = y + gate * torch.tanh(y)
            return self.layers["head"](self.layers["norm"](y)).mean((2, 3))

    net = b.made(Net)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for seed in range(2):
        optimizer.zero_grad()
        F.cross_entropy(net(b.images(seed)), b.labels()).backward()
        optimizer.step()
    return b.state(net)


@idiom()
def a_weight_is_made_in_the_first_forward_pass(b: Bench) -> Found:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.places = nn.Conv2d(3, 4, 3, padding=1), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            if self.places is None:
                self.places = nn.Parameter(normal(1, *y.shape[1:], seed=1))
            return y * self.places

    net = b.made(Net)
    net(b.images())
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.5)
    for seed in range(2):
        optimizer.zero_grad()
        net(b.images(seed)).square().mean().backward()
        optimizer.step()
    return b.state(net)


@idiom()
def a_head_was_never_spread(b: Bench) -> Found:
    torch.manual_seed(2)
    head = nn.Sequential(
        nn.Conv2d(6, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 5),
    ).double()  # fmt: skip
    optimizer = torch.optim.SGD([*b.model.parameters(), *head.parameters()], 0.1, momentum=0.9)
    for seed in range(2):
        optimizer.zero_grad()
        F.cross_entropy(head(b.model.features(b.images(seed))), b.labels()).backward()
        optimizer.step()
    return b.state() | {f"head {name}": t for name, t in head.state_dict().items()}


@idiom()
def activations_are_exchanged_in_a_spread_model(b: Bench) -> Found:
    net = b.made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU()))
    for name, module in list(net.named_children()):
        if isinstance(module, nn.ReLU):
            setattr(net, name, nn.Hardswish())
    net.insert(1, nn.GroupNorm(2, 4).double())
    y = net(b.images())
    F.cross_entropy(y.mean((2, 3)), b.labels()).backward()
    return {"y": y} | b.gradients(net)


@idiom()
def states_and_steps_have_hooks(b: Bench) -> Found:
    def halve(optimizer: Any, args: Any, named: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    sums: list[torch.Tensor] = []
    b.optimizer.register_step_pre_hook(halve)
    b.optimizer.register_step_post_hook(lambda *_: sums.append(sum(p.detach().norm() for p in b.model.parameters())))
    b.model.register_state_dict_post_hook(lambda m, d, prefix, _: d.update(extra=d[f"{prefix}head.weight"] * 2))
    b.model.register_load_state_dict_pre_hook(lambda m, d, *_: d.pop("extra"))
    b.step()
    state = {name: t.clone() for name, t in b.model.state_dict().items()}
    b.step(1)
    b.model.load_state_dict(state)
    return b.state() | {"sums": torch.stack([s.detach() for s in sums])}


@idiom()
def every_module_has_a_hook(b: Bench) -> Found:
    seen: list[torch.Tensor] = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda m, _, y: seen.append(y.detach().abs().mean()) if isinstance(m, nn.Conv2d) else None
    )
    try:
        b.step()
    finally:
        hook.remove()
    return b.state() | {"seen": torch.stack(seen)}


@idiom()
def results_are_dataclasses_and_named_tuples(b: Bench) -> Found:
    @dataclass
    class Output:
        logits: torch.Tensor
        features: Any

    Features = namedtuple("Features", "low high")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 5, 1)

        def forward(self, batch: dict[str, torch.Tensor]) -> Output:
            low = self.conv(batch["image"])
            high = self.head(F.relu(low))
            return Output(high.mean((2, 3)), Features(low, {"map": high}))

    net = b.made(Net)
    found = net({"image": b.images()})
    (F.cross_entropy(found.logits, b.labels()) + found.features.high["map"].square().mean()).backward()
    return {"logits": found.logits} | b.gradients(net)


@idiom()
def a_model_is_compiled_or_wrapped(b: Bench) -> Found:
    found = {}
    for name, wrapped in {"compiled": torch.compile(b.model), "parallel": nn.DataParallel(b.model)}.items():
        b.optimizer.zero_grad()
        F.cross_entropy(wrapped(b.images()), b.labels()).backward()
        found |= {f"{name} {key}": gradient for key, gradient in b.gradients().items()}
    return found


@idiom(refused="call the Python function or module that it was made from")
def a_function_is_a_script(b: Bench) -> Found:
    @torch.jit.script
    def swish(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)

    return {"y": swish(b.model.begin(b.images()))}


@idiom()
def modes_surround_a_step(b: Bench) -> Found:
    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    with Counting(), torch.device("cpu"), torch.profiler.record_function("a step"):
        b.step()
    return b.state()


# -- Python's numbers and collections ---------------------------------------------------------------------------------


@idiom()
def losses_become_pythons_numbers(b: Bench) -> Found:
    losses = [b.loss(seed) for seed in range(3)]
    count, x = b.labels().max(), b.images()
    ordered = sorted(losses)
    (ordered[0] + max(losses) + sum(losses)).backward()
    detached = [loss.detach() for loss in losses]
    return b.gradients() | {
        "mean": float(np.mean(detached)), "root": math.sqrt(detached[0]), "text": float(f"{detached[0]:.6f}"),
        "range": len(range(count)), "listed": [3, 1, 4, 1, 5][count], "rows": x[:, :, :count], "image": x[count],
        "tensor": torch.tensor(detached), "stacked": torch.stack(ordered).detach(),
    }  # fmt: skip


@idiom()
def scalars_fill_new_tensors(b: Bench) -> Found:
    loss, count, x = b.loss().detach(), b.labels().max(), b.images()
    return {
        "full": torch.full((2,), loss), "like": torch.full_like(x, loss), "new": x.new_full((2,), loss),
        "range": torch.arange(count), "line": torch.linspace(0, loss, 4),
    }  # fmt: skip


@idiom()
def results_are_noted_in_plain_tensors(b: Bench) -> Found:
    history, queue = torch.zeros(4).double(), torch.ones(5, 3, 7, 9).double()
    history[1] = b.loss().detach()
    history[2:] = b.loss(1).detach()
    queue[:2] = b.images()[:2] * 2
    queue[b.images() > 0] = 0
    queue.masked_fill_(b.images() < -1, 3)
    sums = torch.zeros(6).double().index_add_(0, b.labels(), b.images().mean((1, 2, 3)))
    marks = torch.zeros(5, 5).double().scatter_(1, b.labels()[:, None], 1.0)
    table = torch.linspace(0, 1, 5, dtype=torch.float64)[b.labels()]
    return {"history": history, "queue": queue, "sums": sums, "marks": marks, "table": table}


@idiom()
def elements_go_through_python(b: Bench) -> Found:
    x, y = b.images().clone(), b.images().clone()
    x.apply_(lambda value: 2 * value if value > 0 else 0.0)
    y.map_(b.images(1), lambda mine, other: mine * other)
    return {"x": x, "y": y}


@idiom()
def weights_are_keys(b: Bench) -> Found:
    sums = {p: torch.zeros_like(p) for p in b.model.parameters()}
    b.loss().backward()
    for p in b.model.parameters():
        sums[p].add_(p.grad)
    head = set(b.model.head.parameters())
    body = [p for p in b.model.parameters() if p not in head]
    torch.optim.SGD([{"params": body}, {"params": [*head], "lr": 1.0}], 0.1).step()
    names = {id(p): name for name, p in b.model.named_parameters()}
    return b.state() | {f"sum of {names[id(p)]}": total for p, total in sums.items()}


@idiom()
def tensors_are_a_dataset(b: Bench) -> Found:
    batches = [*DataLoader(TensorDataset(b.images(), b.labels()), batch_size=2)]
    collated = default_collate([{"image": b.images()[i], "number": i} for i in range(3)])
    return {"x": batches[1][0], "y": batches[2][1], "image": collated["image"], "number": collated["number"]}
