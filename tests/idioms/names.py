"""Functions by their other names, arrays of NumPy, fused optimizers, quantization, questions about memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from tests.distconv.layouts import normal
from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


@idiom()
def layers_are_called_by_their_names_in_aten(b: Bench) -> Found:
    x = b.images().requires_grad_()
    points = b.place(normal(5, 4, 6, 2).sigmoid() * 2 - 1, ("n", "h", "w", None))
    torch.manual_seed(0)
    dropped, mask = torch.native_dropout(x, 0.4, True)
    found = {
        "sampled": torch.grid_sampler(x, points, 0, 1, False),
        "normed": torch.instance_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
        "dropped": dropped,
    }
    sum((each**3).sum() for each in found.values()).backward()
    return found | {"mask": mask, "dL/dx": x.grad}


@idiom()
def losses_are_called_by_their_names_in_aten(b: Bench) -> Found:
    x, t = b.images().requires_grad_(), b.images(1)
    flat, other = x.flatten(1), t.flatten(1)
    losses = [
        torch.kl_div(x, t.exp(), 1),
        torch.binary_cross_entropy_with_logits(x, t.sigmoid(), None, None, 1),
        torch.hinge_embedding_loss(x, t.sign(), 1.0, 2),
        torch.poisson_nll_loss(x, t.abs(), True, False, 1e-8, 1),
        torch.margin_ranking_loss(x, t, t.sign(), 0.0, 2),
        torch.cosine_embedding_loss(flat, other, torch.ones(5, dtype=torch.float64), 0.0, 1),
    ]
    torch.stack(losses).sum().backward()
    return {"losses": torch.stack(losses), "dL/dx": x.grad}


@idiom(quick=True)
def arrays_of_numpy_are_made(b: Bench) -> Found:
    x = b.images()
    classes = x.detach().cpu().numpy().argmax(1)
    return {"classes": torch.from_numpy(classes), "mean": float(np.mean(np.asarray(x))), "more": np.add(x, 1)}


@idiom(quick=True)
def fused_optimizers_step(b: Bench) -> Found:
    for kind, options in (
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
    ):
        optimizer = kind(b.model.parameters(), 1e-2, fused=True, **options)
        for seed in range(2):
            optimizer.zero_grad()
            b.loss(seed).backward()
            optimizer.step()
    return b.state()


@idiom()
def a_fused_optimizer_skips_an_infinite_step(b: Bench) -> Found:
    optimizer = torch.optim.AdamW(b.model.parameters(), 1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in range(3):
        optimizer.zero_grad()
        scaler.scale(b.loss(seed) * (float("inf") if seed == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return b.state() | {"scale": scaler.get_scale()}


@idiom(quick=True)
def parts_of_a_leaf_are_changed_without_gradients(b: Bench) -> Found:
    x = b.images().requires_grad_()
    with torch.no_grad():
        x.chunk(3, 1)[1].mul_(3)
        x.split(2, 2)[1].zero_()
        for part in b.model.hidden.weight.chunk(2, 0):
            nn.init.constant_(part, 0.3)
    ((x * x).sum() + b.loss()).backward()
    return b.gradients() | {"x": x, "dL/dx": x.grad}


@idiom()
def values_are_rounded_to_eight_bits(b: Bench) -> Found:
    x = b.images().float()
    by_channel = torch.quantize_per_channel(x, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 1, torch.qint8)
    return {"all": torch.quantize_per_tensor(x, 0.1, 2, torch.qint8).dequantize(), "channels": by_channel.dequantize()}


@idiom()
def questions_about_memory_are_answered(b: Bench) -> Found:
    x = b.images().requires_grad_()
    y = x * 2
    y.retain_grad()
    last = y.contiguous(memory_format=torch.channels_last)
    answers = [
        y.is_contiguous(), y.permute(0, 2, 3, 1).is_contiguous(), last.is_contiguous(), y[:, :, 1:].is_contiguous(),
        last.is_contiguous(memory_format=torch.channels_last), y.retains_grad, x.retains_grad, y.is_pinned(),
    ]  # fmt: skip
    return {"answers": torch.tensor(answers)}
