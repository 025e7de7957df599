"""Moving averages of weights, and weights that are put in for an evaluation."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


def trained(b: Bench, steps: int = 2) -> None:
    for seed in range(steps):
        b.step(seed)


@idiom(quick=True)
def an_average_of_parameters_follows(b: Bench) -> Found:
    ema = copy.deepcopy(b.model)
    for seed in range(2):
        b.step(seed)
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), b.model.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            for slow, fast in zip(ema.buffers(), b.model.buffers(), strict=True):
                slow.copy_(fast)
    return b.state(ema) | {"y": ema.eval()(b.images(4))}


@idiom()
def an_average_of_data_follows(b: Bench) -> Found:
    ema = copy.deepcopy(b.model)
    trained(b)
    for slow, fast in zip(ema.parameters(), b.model.parameters(), strict=True):
        slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
    return b.state(ema)


@idiom()
def shadows_are_kept_in_a_dict(b: Bench) -> Found:
    shadow = {n: p.data.clone() for n, p in b.model.named_parameters()}
    trained(b)
    for n, p in b.model.named_parameters():
        shadow[n] = 0.9 * shadow[n] + 0.1 * p.data
    backup = {n: p.data for n, p in b.model.named_parameters()}
    for n, p in b.model.named_parameters():
        p.data = shadow[n]
    with torch.no_grad():
        loss = b.loss(1)
    shadowed = {f"shadow {n}": t for n, t in b.state().items()}
    for n, p in b.model.named_parameters():
        p.data = backup[n]
    return b.state() | shadowed | {"loss": loss}


@idiom()
def shadows_of_a_state_are_loaded(b: Bench) -> Found:
    shadow = {k: v.clone() for k, v in b.model.state_dict().items()}
    trained(b)
    for k, v in b.model.state_dict().items():
        if v.is_floating_point():
            shadow[k].mul_(0.9).add_(v, alpha=0.1)
    b.model.load_state_dict(shadow)
    trained(b, 1)
    return b.state()


@idiom()
def torch_averages_models(b: Bench) -> Found:
    mean, both = AveragedModel(b.model), AveragedModel(b.model, use_buffers=True)
    for seed in range(2):
        b.step(seed)
        mean.update_parameters(b.model)
        both.update_parameters(b.model)
    update_bn([b.images(5)], mean)
    return b.state(mean) | {f"both {n}": t for n, t in b.state(both).items()}


@idiom()
def torch_averages_models_by_exponents(b: Bench) -> Found:
    many = AveragedModel(b.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    each = AveragedModel(b.model, avg_fn=lambda slow, fast, count: 0.9 * slow + 0.1 * fast)
    for seed in range(2):
        b.step(seed)
        many.update_parameters(b.model)
        each.update_parameters(b.model)
    return b.state(many) | {f"each {n}": t for n, t in b.state(each).items()}


@idiom()
def averages_swap_places_with_weights(b: Bench) -> Found:
    ema = copy.deepcopy(b.model)
    trained(b)
    with torch.no_grad():
        for slow, fast in zip(ema.parameters(), b.model.parameters(), strict=True):
            kept = fast.detach().clone()
            fast.copy_(slow)
            slow.data.copy_(kept)
    trained(b, 1)
    return b.state() | {f"average {n}": t for n, t in b.state(ema).items()}


@idiom()
def an_average_decays_by_its_age(b: Bench) -> Found:
    """With warm-up of the decay, many tensors at once."""
    ema = copy.deepcopy(b.model).requires_grad_(False)
    for seed in range(2):
        b.step(seed)
        decay = min(0.999, (1 + seed) / (10 + seed))
        slow, fast = list(ema.parameters()), [p.detach() for p in b.model.parameters()]
        torch._foreach_mul_(slow, decay)
        torch._foreach_add_(slow, fast, alpha=1 - decay)
    return b.state(ema)


@idiom()
def a_distance_to_the_first_weights_is_measured(b: Bench) -> Found:
    first = nn.utils.parameters_to_vector(b.model.parameters()).detach().clone()
    trained(b)
    now = nn.utils.parameters_to_vector(b.model.parameters())
    return {"distance": (now - first).norm(), "angle": torch.cosine_similarity(now, first, dim=0)}
