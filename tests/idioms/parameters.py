"""Weights read, written, tied, computed, saved and loaded, whoever holds which part of them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.idioms.bench import Bench, Found, kept
from tests.idioms.table import idiom


def trained(b: Bench, steps: int = 2) -> None:
    for seed in range(steps):
        b.step(seed)


# -- state dicts ------------------------------------------------------------------------------------------------------


@idiom(quick=True)
def an_average_is_written_into_a_state(b: Bench) -> Found:
    """ultralytics' ModelEMA."""
    ema = copy.deepcopy(b.model)
    for seed in range(2):
        b.step(seed)
        state = b.model.state_dict()
        for k, v in ema.state_dict().items():
            if v.dtype.is_floating_point:
                v *= 0.9
                v += 0.1 * state[k].detach()
    return b.state(ema)


@idiom()
def an_average_is_copied_into_a_state(b: Bench) -> Found:
    """timm's ModelEma, with and without many tensors at once."""
    ema, other = copy.deepcopy(b.model).eval(), copy.deepcopy(b.model).eval()
    trained(b)
    with torch.no_grad():
        for slow, fast in zip(ema.state_dict().values(), b.model.state_dict().values(), strict=True):
            slow.copy_(0.9 * slow + 0.1 * fast)
        pairs = [
            (slow, fast)
            for slow, fast in zip(other.state_dict().values(), b.model.state_dict().values(), strict=True)
            if slow.is_floating_point()
        ]
        torch._foreach_lerp_([slow for slow, _ in pairs], [fast for _, fast in pairs], 0.1)
    return b.state(ema) | {f"other {n}": t for n, t in b.state(other).items()}


@idiom()
def entries_of_a_state_are_written(b: Bench) -> Found:
    state = b.model.state_dict()
    with torch.no_grad():
        for name in state:
            if "weight" in name:
                state[name].mul_(0.5)
        state["first.weight"][0] = 1.0
        nn.init.constant_(state["head.weight"], 0.25)
    return b.state() | {"loss": b.loss(1)}


@idiom()
def a_state_follows_the_model(b: Bench) -> Found:
    state = b.model.state_dict()
    trained(b, 1)
    return dict(state)


@idiom()
def a_part_of_a_state_is_loaded(b: Bench) -> Found:
    state = {k: v * 0.5 if v.is_floating_point() else v for k, v in b.model.state_dict().items()}
    state.pop("head.weight")
    missing = b.model.load_state_dict(state, strict=False)
    assert missing.missing_keys == ["head.weight"]
    mine = b.model.state_dict()
    mine.update({k: v for k, v in state.items() if k.startswith("second")})
    b.model.load_state_dict(mine)
    trained(b, 1)
    return b.state()


@idiom()
def a_state_is_loaded_entry_by_entry(b: Bench) -> Found:
    state = {k: v.clone() * 2 for k, v in b.model.state_dict().items() if v.is_floating_point()}
    own = b.model.state_dict()
    for name, value in state.items():
        own[name].copy_(value)
    return b.state()


@idiom()
def a_state_is_assigned(b: Bench) -> Found:
    state = {k: v.clone() for k, v in b.model.state_dict().items()}
    b.model.load_state_dict(state, assign=True)
    b.optimizer = torch.optim.SGD(b.model.parameters(), 0.05)
    trained(b)
    return b.state()


@idiom()
def training_is_saved_and_resumed(b: Bench) -> Found:
    trained(b)
    file = io.BytesIO()
    torch.save({"model": b.model.state_dict(), "optimizer": b.optimizer.state_dict()}, file)
    trained(b)
    file.seek(0)
    loaded = torch.load(file)
    b.model.load_state_dict(loaded["model"])
    b.optimizer.load_state_dict(loaded["optimizer"])
    trained(b, 1)
    return b.state(optimizer=True)


@idiom()
def the_optimizers_state_is_written(b: Bench) -> Found:
    trained(b)
    for state in b.optimizer.state.values():
        state["momentum_buffer"].mul_(0.5)
    trained(b, 1)
    return b.state(optimizer=True)


@idiom()
def the_optimizers_state_is_written_through_its_dict(b: Bench) -> Found:
    trained(b)
    for state in b.optimizer.state_dict()["state"].values():
        state["momentum_buffer"].mul_(0.5)
    trained(b, 1)
    return b.state(optimizer=True)


# -- reading and writing ----------------------------------------------------------------------------------------------


@idiom()
def weights_become_one_vector_and_back(b: Bench) -> Found:
    trained(b, 1)
    vector = nn.utils.parameters_to_vector(b.model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, b.model.parameters())
    return b.state() | {"vector": vector, "loss": b.loss(1)}


@idiom()
def weights_are_initialized_anew(b: Bench) -> Found:
    torch.manual_seed(1)
    found = {}
    weight = b.model.second.weight
    for initialize in (
        nn.init.kaiming_normal_, nn.init.xavier_uniform_, nn.init.orthogonal_, nn.init.trunc_normal_, nn.init.dirac_,
    ):  # fmt: skip
        initialize(weight)
        found[initialize.__name__] = kept(weight)
    nn.init.eye_(b.model.head.weight)
    nn.init.uniform_(b.model.head.bias)
    b.model.hidden.reset_parameters()
    b.model.apply(lambda m: nn.init.normal_(m.weight, 0, 0.02) if isinstance(m, nn.Conv2d) else None)
    return found | b.state()


@idiom()
def weights_are_changed_by_rows(b: Bench) -> Found:
    with torch.no_grad():
        b.model.head.weight[2] = 0.5
        b.model.head.bias.data[[0, 3]] = -1.0
        b.model.first.weight[:, 1].mul_(2)
        b.model.second.weight.data = b.model.second.weight.data.flip(0)
        b.model.norm.weight.data.fill_(0.7)
    return b.state() | {"loss": b.loss()}


@idiom()
def weights_are_standardized(b: Bench) -> Found:
    w = b.model.first.weight
    w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
    y = F.conv2d(b.images(), w, padding=1)
    F.cross_entropy(y.mean((2, 3))[:, :5], b.labels()).backward()
    return b.gradients()


@idiom()
def singular_values_and_norms_are_penalized(b: Bench) -> Found:
    w = b.model.second.weight
    penalty = (
        torch.linalg.matrix_norm(b.model.hidden.weight, "nuc") + w.flatten(1).norm(dim=1).sum() + w.std()
        + torch.linalg.svdvals(w.flatten(1)).max() + w.var(dim=(1, 2, 3)).sum()
    )  # fmt: skip
    (b.loss() + penalty).backward()
    return b.gradients()


@idiom()
def gradients_become_plain_tensors(b: Bench) -> Found:
    b.loss().backward()
    for p in b.model.parameters():
        p.grad = torch.ones(p.shape, dtype=p.dtype) * 0.1
    b.optimizer.step()
    return b.state()


@idiom()
def gradients_are_plain_before_a_backward_pass(b: Bench) -> Found:
    for p in b.model.parameters():
        p.grad = torch.ones(p.shape, dtype=p.dtype) * 0.1
    b.loss().backward()
    b.optimizer.step()
    return b.state()


# -- tied and computed ------------------------------------------------------------------------------------------------


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 5))
    net[2].weight = net[0].weight
    return net


@idiom()
def two_layers_share_a_weight(b: Bench) -> Found:
    net = b.made(tied)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for seed in range(2):
        x = torch.cat([b.images(seed).mean((2, 3))] * 2, 1)
        optimizer.zero_grad()
        F.cross_entropy(net(x), b.labels()).backward()
        optimizer.step()
    return b.state(net)


@idiom()
def a_copy_of_tied_layers_is_tied(b: Bench) -> Found:
    net = b.made(tied)
    ema = copy.deepcopy(net)
    assert ema[0].weight is ema[2].weight
    with torch.no_grad():
        net[0].weight.mul_(2)
        for k, v in ema.state_dict().items():
            v.mul_(0.5).add_(net.state_dict()[k], alpha=0.5)
    return b.state(ema)


@idiom()
def a_decoder_uses_the_encoders_weight(b: Bench) -> Found:
    x = b.model.first(b.images())
    y = F.conv_transpose2d(x, b.model.first.weight, padding=1)
    F.mse_loss(y, b.images()).backward()
    return b.gradients()


def computed(b: Bench, wrap: Callable[[nn.Module], nn.Module], after: bool = False) -> Found:
    """Two steps of a convolution whose weight is computed, wrapped before or after it is spread."""
    net = b.made((lambda: nn.Conv2d(3, 4, 3)) if after else (lambda: wrap(nn.Conv2d(3, 4, 3))))
    if after:
        torch.manual_seed(6)
        net = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for seed in range(2):
        optimizer.zero_grad()
        net(b.images(seed)).square().mean().backward()
        optimizer.step()
    return b.state(net) | b.gradients(net)


@idiom()
def a_spectral_norm_divides_a_weight(b: Bench) -> Found:
    return computed(b, parametrizations.spectral_norm)


@idiom()
def a_spectral_norm_comes_later(b: Bench) -> Found:
    return computed(b, parametrizations.spectral_norm, after=True)


@idiom()
def a_weight_has_length_and_direction(b: Bench) -> Found:
    return computed(b, parametrizations.weight_norm)


@idiom()
def a_weight_has_length_and_direction_later(b: Bench) -> Found:
    return computed(b, parametrizations.weight_norm, after=True)


@idiom()
def a_weight_stays_orthogonal(b: Bench) -> Found:
    return computed(b, parametrizations.orthogonal)


@idiom()
def the_old_spectral_norm_uses_a_hook(b: Bench) -> Found:
    return computed(b, nn.utils.spectral_norm)


@idiom()
def a_weight_is_parametrized_by_ones_own_module(b: Bench) -> Found:
    class Symmetric(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return 0.5 * (w + w.flip(-1)) + 0.01 * w.norm()

    def wrap(net: Any) -> Any:
        nn.utils.parametrize.register_parametrization(net, "weight", Symmetric())
        return net

    return computed(b, wrap, after=True)


@idiom()
def weights_are_pruned_by_size(b: Bench) -> Found:
    return computed(b, lambda net: prune.l1_unstructured(net, "weight", 0.3), after=True)


@idiom()
def filters_are_pruned_by_their_norms(b: Bench) -> Found:
    return computed(b, lambda net: prune.ln_structured(net, "weight", 0.3, 2, 0))


@idiom()
def masks_of_weights_are_kept_by_hand(b: Bench) -> Found:
    """Lottery tickets: the smallest share over all layers is held at zero."""
    trained(b, 1)
    weights = [p for p in b.model.parameters() if p.dim() > 1]
    least = torch.cat([p.detach().abs().flatten() for p in weights]).kthvalue(100).values
    masks = [(p.detach().abs() > least).double() for p in weights]
    for seed in range(2):
        b.optimizer.zero_grad()
        b.loss(seed).backward()
        for p, m in zip(weights, masks, strict=True):
            p.grad.mul_(m)
        b.optimizer.step()
        with torch.no_grad():
            for p, m in zip(weights, masks, strict=True):
                p.mul_(m)
    return b.state()


@idiom()
def a_weight_is_made_by_another_network(b: Bench) -> Found:
    maker = b.made(lambda: nn.Linear(4, 4 * 3 * 9))
    w = maker(torch.ones(4, dtype=torch.float64)).view(4, 3, 3, 3)
    F.conv2d(b.images(), w, padding=1).square().mean().backward()
    return b.gradients(maker)


@idiom()
def parameters_of_ones_own_are_added(b: Bench) -> Found:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 3, padding=1)
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5).view(1, 5, 1, 1))
            self.power = nn.Parameter(torch.tensor(2.0))
            self.register_buffer("mean", torch.zeros(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x) * self.scale
            if self.training:
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(y.mean((0, 2, 3)), alpha=0.1)
            pooled = F.avg_pool2d(y.clamp(min=1e-6).pow(self.power), (7, 9)).pow(1.0 / self.power)
            return pooled.flatten(1) - self.mean

    net = b.made(Scaled)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for seed in range(2):
        optimizer.zero_grad()
        F.cross_entropy(net(b.images(seed)), b.labels()).backward()
        optimizer.step()
    return b.state(net)


@idiom()
def lazy_layers_take_their_sizes_from_data(b: Bench) -> Found:
    torch.manual_seed(2)
    net = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(5)).double()
    net(torch.zeros(2, 3, 7, 9, dtype=torch.float64))
    b.parallel(net)
    F.cross_entropy(net(b.images()), b.labels()).backward()
    return b.gradients(net)
