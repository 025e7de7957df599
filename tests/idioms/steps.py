"""Steps that are more than one gradient: sharpened, adapted, held back."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.distconv.layouts import normal
from tests.idioms.bench import Bench, Found, kept
from tests.idioms.table import idiom

schedulers = torch.optim.lr_scheduler


# -- other steps ------------------------------------------------------------------------------------------------------


@idiom(quick=True)
def steps_are_sharpened(b: Bench) -> Found:
    """SAM: up along the gradient, a second pass, back and down."""
    for seed in range(2):
        b.optimizer.zero_grad()
        b.loss(seed).backward()
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in b.model.parameters()]), p=2)
        ups = []
        with torch.no_grad():
            for p in b.model.parameters():
                up = p.grad * (0.05 / (norm + 1e-12))
                p.add_(up)
                ups.append(up)
        b.optimizer.zero_grad()
        b.loss(seed).backward()
        with torch.no_grad():
            for p, up in zip(b.model.parameters(), ups, strict=True):
                p.sub_(up)
        b.optimizer.step()
    return b.state()


@idiom()
def weights_are_attacked_and_restored(b: Bench) -> Found:
    """Adversarial weight perturbation, with a copied model."""
    proxy = copy.deepcopy(b.model)
    optimizer = torch.optim.SGD(proxy.parameters(), 0.1)
    (-b.loss(0, proxy)).backward()
    optimizer.step()
    shift = {n: q.data - p.data for (n, p), q in zip(b.model.named_parameters(), proxy.parameters(), strict=True)}
    with torch.no_grad():
        for n, p in b.model.named_parameters():
            p.add_(shift[n] / (shift[n].norm() + 1e-6) * p.norm(), alpha=0.1)
    b.loss(0).backward()
    with torch.no_grad():
        for n, p in b.model.named_parameters():
            p.sub_(shift[n] / (shift[n].norm() + 1e-6) * p.norm(), alpha=0.1)
    b.optimizer.step()
    return b.state()


@idiom()
def first_layers_are_frozen_and_thawed(b: Bench) -> Found:
    for name, p in b.model.named_parameters():
        p.requires_grad = not name.startswith(("first", "norm"))
    b.model.norm.eval()
    b.optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, b.model.parameters()), 1e-2)
    b.step(0)
    b.model.requires_grad_(True)
    b.optimizer.add_param_group({"params": [*b.model.first.parameters(), *b.model.norm.parameters()], "lr": 1e-3})
    b.model.train()
    b.step(1)
    return b.state()


@idiom()
def a_head_is_replaced_for_other_classes(b: Bench) -> Found:
    b.step(0)
    b.model.head = b.made(lambda: nn.Linear(7, 4), 8)
    b.optimizer = torch.optim.SGD(b.model.parameters(), 0.05)
    for seed in range(2):
        b.optimizer.zero_grad()
        F.cross_entropy(b.model(b.images(seed)), b.labels() % 4).backward()
        b.optimizer.step()
    return b.state()


@idiom()
def low_ranks_adapt_a_frozen_layer(b: Bench) -> Found:
    """LoRA around a linear layer."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base
            self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 7, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + 0.5 * self.b(self.a(x))

    b.model.requires_grad_(False)
    torch.manual_seed(8)
    adapted = Adapted(b.model.hidden)
    b.parallel(adapted.a), b.parallel(adapted.b)
    b.model.hidden = adapted
    b.optimizer = torch.optim.AdamW([p for p in b.model.parameters() if p.requires_grad], 1e-2)
    b.step(0)
    b.step(1)
    with torch.no_grad():
        adapted.base.weight += 0.5 * adapted.b.weight @ adapted.a.weight
    return b.state()


@idiom()
def the_best_weights_are_kept_and_loaded(b: Bench) -> Found:
    best, kept_state, waited = float("inf"), None, 0
    for seed in range(4):
        b.step(seed)
        b.model.eval()
        with torch.no_grad():
            loss = b.loss(9).item()
        b.model.train()
        if loss < best:
            best, kept_state, waited = loss, copy.deepcopy(b.model.state_dict()), 0
        else:
            waited += 1
        if waited > 2:
            break
    b.model.load_state_dict(kept_state)
    return b.state() | {"best": best}


@idiom()
def training_goes_on_from_a_checkpoint(b: Bench) -> Found:
    import io

    scheduler = schedulers.StepLR(b.optimizer, 1, 0.5)
    b.step(0)
    scheduler.step()
    file = io.BytesIO()
    saved = {"model": b.model.state_dict(), "optimizer": b.optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(saved | {"rng": torch.get_rng_state(), "epoch": 1}, file)
    b.step(1)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    b.model.load_state_dict(loaded["model"])
    b.optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    torch.set_rng_state(loaded["rng"])
    b.step(2)
    return b.state()


@idiom()
def norms_learn_their_statistics_anew(b: Bench) -> Found:
    """Precise batch norm: momentum None, statistics reset, batches without gradients."""
    for m in b.model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.reset_running_stats()
            m.momentum = None
    with torch.no_grad():
        for seed in range(3):
            b.model(b.images(seed))
    return b.state() | {"y": b.model.eval()(b.images(5))}


@idiom()
def only_norms_adapt_at_test_time(b: Bench) -> Found:
    """TENT: entropy minimized over the scales of norms, statistics of the batch."""
    b.model.train().requires_grad_(False)
    for m in b.model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.requires_grad_(True)
            m.track_running_stats = False
            m.running_mean = m.running_var = None
    optimizer = torch.optim.Adam([p for p in b.model.parameters() if p.requires_grad], 1e-2)
    for seed in range(2):
        y = b.model(b.images(seed))
        optimizer.zero_grad()
        (-(y.softmax(1) * y.log_softmax(1)).sum(1)).mean().backward()
        optimizer.step()
    return b.state() | {"y": y}


@idiom()
def important_weights_are_held(b: Bench) -> Found:
    """Elastic weight consolidation: the diagonal of the Fisher information from squared gradients."""
    fisher = {n: torch.zeros_like(p) for n, p in b.model.named_parameters()}
    for seed in range(2):
        b.model.zero_grad()
        b.loss(seed).backward()
        for n, p in b.model.named_parameters():
            fisher[n] += p.grad.data.clone().pow(2) / 2
    old = {n: p.clone().detach() for n, p in b.model.named_parameters()}
    for seed in range(2):
        b.optimizer.zero_grad()
        held = sum((fisher[n] * (p - old[n]).pow(2)).sum() for n, p in b.model.named_parameters())
        (b.loss(seed) + 100 * held).backward()
        b.optimizer.step()
    return b.state() | {f"fisher {n}": f for n, f in fisher.items()}


@idiom()
def weights_are_decayed_in_the_loss(b: Bench) -> Found:
    l1 = sum(p.abs().sum() for p in b.model.parameters())
    l2 = sum(torch.sum(p**2) for n, p in b.model.named_parameters() if "weight" in n)
    group = b.model.second.weight.pow(2).sum((1, 2, 3)).sqrt().sum() + b.model.norm.weight.abs().sum()
    (b.loss() + 1e-3 * l1 + 1e-3 * l2 + 1e-2 * group).backward()
    return b.gradients()


@idiom()
def filters_are_kept_orthogonal(b: Bench) -> Found:
    loss = b.loss()
    for m in b.model.modules():
        if isinstance(m, nn.Conv2d):
            w = m.weight.view(m.weight.size(0), -1)
            loss = loss + 0.01 * (w @ w.t() - torch.eye(w.size(0), dtype=w.dtype)).pow(2).sum()
    loss.backward()
    return b.gradients()


@idiom()
def models_are_averaged_and_ensembled(b: Bench) -> Found:
    """Model soups, and the mean of predictions."""
    models = []
    for seed in range(2):
        b.step(seed)
        models.append(copy.deepcopy(b.model))
    mean = {k: sum(m.state_dict()[k] for m in models) / 2 for k in models[0].state_dict()}
    soup = copy.deepcopy(b.model)
    soup.load_state_dict({k: v.to(soup.state_dict()[k].dtype) for k, v in mean.items()})
    y = torch.stack([m.eval()(b.images(5)).softmax(1) for m in models]).mean(0)
    return b.state(soup) | {"y": y, "log": y.log().sum()}


@idiom()
def the_optimizer_was_made_before_the_model_was_spread(b: Bench) -> Found:
    torch.manual_seed(9)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    b.parallel(net)
    for seed in range(2):
        optimizer.zero_grad()
        F.cross_entropy(net(b.images(seed)), b.labels()).backward()
        optimizer.step()
    return b.state(net)


@idiom()
def batches_come_from_a_loader(b: Bench) -> Found:
    data = torch.utils.data.TensorDataset(normal(13, 3, 7, 9, seed=1), torch.arange(13) % 5)
    loader = torch.utils.data.DataLoader(data, 5, shuffle=True, generator=torch.Generator().manual_seed(3))
    losses = []
    for x, labels in loader:
        b.optimizer.zero_grad()
        loss = F.cross_entropy(b.model(b.place(x)), b.place(labels, "n"))
        loss.backward()
        b.optimizer.step()
        losses.append(loss.item())
    return b.state() | {"losses": torch.tensor(losses)}


@idiom()
def labels_and_masks_stay_plain(b: Bench) -> Found:
    net = b.made(lambda: nn.Conv2d(3, 5, 3, padding=1))
    (
        F.cross_entropy(net(b.images()), torch.arange(315).view(5, 7, 9) % 5)
        + b.model(b.images())[:, 0].dot(torch.ones(5).double())
    ).backward()
    return b.gradients(net) | b.gradients()


@idiom()
def sizes_of_inputs_change_from_step_to_step(b: Bench) -> Found:
    for seed, (rows, columns) in enumerate([(7, 9), (4, 6), (9, 5)]):
        b.optimizer.zero_grad()
        F.cross_entropy(b.model(b.place(normal(5, 3, rows, columns, seed=seed))), b.labels()).backward()
        b.optimizer.step()
    return b.state()


@idiom()
def the_last_batch_is_smaller(b: Bench) -> Found:
    for samples in (5, 2):
        b.optimizer.zero_grad()
        x = b.place(normal(samples, 3, 7, 9, seed=samples))
        F.cross_entropy(b.model(x), b.place(torch.arange(samples), "n")).backward()
        b.optimizer.step()
    return b.state()


@idiom()
def evaluation_happens_in_inference_mode(b: Bench) -> Found:
    b.step()
    with torch.inference_mode():
        y = b.model.eval()(b.images(2))
        best = y.argmax(-1)
    b.model.train()
    b.step(1)
    return b.state() | {"y": y, "best": best}


@idiom()
def anomalies_are_searched_for(b: Bench) -> Found:
    with torch.autograd.set_detect_anomaly(True):
        b.loss().backward()
    return b.gradients()


@idiom()
def a_model_is_counted_and_described(b: Bench) -> Found:
    assert "Conv2d(3, 7" in repr(b.model)
    sizes = [p.numel() * p.element_size() for p in b.model.parameters()]
    trained = sum(p.numel() for p in b.model.parameters() if p.requires_grad)
    return {"bytes": sum(sizes), "trained": trained, "device": float(next(b.model.parameters()).is_cuda)}


@idiom()
def a_model_moves_between_modes_and_dtypes(b: Bench) -> Found:
    b.model.train(False).train().to(torch.float64).cpu().double()
    b.model.apply(lambda m: setattr(m, "inplace", True) if isinstance(m, nn.ReLU) else None)
    b.step()
    return b.state()


@idiom()
def results_are_kept_without_their_graph(b: Bench) -> Found:
    history = []
    for seed in range(2):
        loss = b.loss(seed)
        b.optimizer.zero_grad()
        loss.backward()
        b.optimizer.step()
        history.append(loss.detach())
    return {"mean": torch.stack(history).mean(), "list": torch.tensor([kept(h).item() for h in history])}
