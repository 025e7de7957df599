"""Networks within iterations, and layers that are written out by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.distconv.layouts import normal
from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


def _field() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Softplus(), nn.Conv2d(4, 3, 3, padding=1))


@idiom()
def a_fixed_point_has_an_implicit_gradient(b: Bench) -> Found:
    """A deep equilibrium model: solved without a graph, with a hook that solves for the gradient."""
    net, x = b.made(lambda: nn.Conv2d(3, 3, 3, padding=1)), b.images()

    def step(z: torch.Tensor) -> torch.Tensor:
        return torch.tanh(0.3 * net(z) + x)

    with torch.no_grad():
        z, before = step(torch.zeros_like(x)), torch.zeros_like(x)
        while (z - before).norm() / z.norm() > 1e-9:
            z, before = step(z), z
    y = step(z)
    start = y.clone().detach().requires_grad_()
    again = step(start)

    def solve(gradient: torch.Tensor) -> torch.Tensor:
        found = gradient
        for _ in range(20):
            found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + gradient
        return found

    y.register_hook(solve)
    y.square().mean().backward()
    return {"y": y} | b.gradients(net)


@idiom()
def an_equation_is_integrated(b: Bench) -> Found:
    """A neural ordinary differential equation, by Runge and Kutta."""
    net, x, h = b.made(_field), b.images(), 0.25
    for _ in range(3):
        k1 = net(x)
        k2 = net(x + h / 2 * k1)
        k3 = net(x + h / 2 * k2)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + net(x + h * k3))
    x.square().mean().backward()
    return {"x": x} | b.gradients(net)


@idiom()
def a_divergence_is_estimated(b: Bench) -> Found:
    """Hutchinson's estimate, as continuous normalizing flows take it."""
    net, x, signs = b.made(_field), b.images().requires_grad_(), torch.sign(b.images(4))
    y = net(x)
    found = (torch.autograd.grad(y, x, signs, create_graph=True)[0] * signs).flatten(1).sum(1)
    (y.square().mean() + found.mean()).backward()
    return {"divergence": found} | b.gradients(net)


@idiom()
def gradients_are_taken_in_a_batch(b: Bench) -> Found:
    x = b.images()[:1, :1, :2, :2].detach().requires_grad_()
    seeds = torch.eye(4, dtype=torch.float64)
    (found,) = torch.autograd.grad(x.square().flatten(), x, seeds, is_grads_batched=True)
    y = b.images()[:2, :, :2, :2].detach().requires_grad_()
    some, none = torch.autograd.grad(y.square().sum(), (y, x), materialize_grads=True)
    return {"rows": found, "some": some, "none": none}


@idiom()
def tasks_are_balanced_by_their_gradients(b: Bench) -> Found:
    """GradNorm."""
    weights = nn.Parameter(torch.ones(2, dtype=torch.float64))
    features = b.model.features(b.images())
    answers = b.model.head(F.relu(b.model.hidden(features.mean((2, 3)))))
    losses = torch.stack([features.square().mean(), F.cross_entropy(answers, b.labels())])
    shared = b.model.second.weight
    norms = torch.stack([
        torch.norm(w * torch.autograd.grad(loss, shared, retain_graph=True, create_graph=True)[0])
        for w, loss in zip(weights, losses, strict=True)
    ])  # fmt: skip
    target = (norms.mean() * (losses / losses.mean()) ** 0.12).detach()
    (weights.grad,) = torch.autograd.grad((norms - target).abs().sum(), weights, retain_graph=True)
    (weights.detach() * losses).sum().backward()
    return {"of weights": weights.grad, "norms": norms} | b.gradients()


@idiom()
def one_perturbation_fools_all_images(b: Bench) -> Found:
    change = torch.zeros(1, 3, 7, 9, dtype=torch.float64, requires_grad=True)
    own = nn.Parameter(torch.zeros_like(b.images()))
    for seed in range(2):
        F.cross_entropy(b.model(b.images(seed) + change + own), b.labels()).backward()
        with torch.no_grad():
            change += 0.1 * change.grad.sign()
            change.clamp_(-0.1, 0.1)
            own -= own.grad / own.grad.norm()
        change.grad.detach_().zero_()
        own.grad.detach_().zero_()
    return {"change": change, "own": own}


@idiom()
def weights_are_stepped_by_hand(b: Bench) -> Found:
    def first(p: torch.Tensor) -> None:
        p.sub_(0.1 * p.grad).add_(p.grad, alpha=-0.01)
        p.grad.detach_()
        p.grad.data.zero_()

    def second(p: torch.Tensor) -> None:
        torch.add(p, p.grad, alpha=-0.1, out=p)
        p[:1] -= 0.1 * p.grad[:1]
        p.view(-1)[0] = 0.3
        p.data = p.data - 0.1 * p.grad.data
        del p.grad

    for seed, step in enumerate((first, second, first)):
        b.loss(seed).backward()
        with torch.no_grad():
            for p in b.model.parameters():
                step(p)
    return b.state()


# -- layers by hand ---------------------------------------------------------------------------------------------------


@idiom()
def sums_over_boxes_by_integral_images(b: Bench) -> Found:
    x = b.images().requires_grad_()
    sums = F.pad(x.cumsum(2).cumsum(3), (1, 0, 1, 0))
    y = sums[..., 3:, 3:] - sums[..., :-3, 3:] - sums[..., 3:, :-3] + sums[..., :-3, :-3]
    y.square().sum().backward()
    return {"y": y, "dL/dx": x.grad}


@idiom()
def a_pyramid_keeps_what_blurring_removes(b: Bench) -> Found:
    line = torch.tensor([1, 4, 6, 4, 1], dtype=torch.float64)
    kernel = (line[:, None] * line / 256).expand(3, 1, 5, 5)
    x = b.images().requires_grad_()
    y, levels = x, []
    for _ in range(2):
        less = F.conv2d(F.pad(y, (2, 2, 2, 2), mode="reflect"), kernel, groups=3)[:, :, ::2, ::2]
        levels.append(y - F.interpolate(less, size=y.shape[-2:], mode="bilinear", align_corners=False))
        y = less
    sum(level.abs().mean() for level in levels).backward()
    return {"y": y, "dL/dx": x.grad}


@idiom()
def wavelets_go_there_and_back(b: Bench) -> Found:
    signs = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], dtype=torch.float64)
    kernel = (signs / 2).view(4, 1, 2, 2).repeat(3, 1, 1, 1)
    waves = F.conv2d(b.images()[..., :6, :8], kernel, stride=2, groups=3)
    return {"waves": waves, "back": F.conv_transpose2d(waves, kernel, stride=2, groups=3)}


@idiom()
def a_convolution_is_a_product_of_patches(b: Bench) -> Found:
    layer, x = b.made(lambda: nn.Linear(27, 4)), b.images().requires_grad_()
    y = layer(F.unfold(x, 3, padding=1).transpose(1, 2)).transpose(1, 2).view(5, 4, 7, 9)
    y.square().mean().backward()
    return {"y": y, "dL/dx": x.grad} | b.gradients(layer)


@idiom()
def each_image_makes_its_kernel(b: Bench) -> Found:
    make, x = b.made(lambda: nn.Linear(3, 27)), b.images()
    kernels = make(x.mean((2, 3))).view(15, 1, 3, 3)
    y = F.conv2d(x.reshape(1, 15, 7, 9), kernels, padding=1, groups=15).view(5, 3, 7, 9)
    y.square().mean().backward()
    return {"y": y} | b.gradients(make)


@idiom()
def places_are_moved_by_offsets(b: Bench) -> Found:
    conv, x = b.made(lambda: nn.Conv2d(3, 2, 3, padding=1)), b.images()
    offsets = conv(x)
    n, _, h, w = offsets.shape
    rows = (torch.arange(h)[:, None] + offsets[:, 0].detach().round().long()).clamp(0, h - 1)
    columns = (torch.arange(w) + offsets[:, 1].detach().round().long()).clamp(0, w - 1)
    y = x[torch.arange(n)[:, None, None], :, rows, columns]
    (y.mean(-1) * offsets[:, 0]).sum().backward()
    return {"y": y} | b.gradients(conv)


@idiom()
def statistics_of_ghosts_normalize_parts_of_a_batch(b: Bench) -> Found:
    norm = b.made(lambda: nn.BatchNorm2d(3))
    y = torch.cat([norm(part) for part in b.images().chunk(2)])
    (y**3).mean().backward()
    return {"y": y} | b.state(norm) | b.gradients(norm)


@idiom()
def text_is_read_from_columns(b: Bench) -> Found:
    """Convolutions, a recurrence over columns, and CTC."""
    conv, head = b.made(lambda: nn.Conv2d(3, 6, 3, padding=1)), b.made(lambda: nn.Linear(8, 5))
    recurrence = b.made(lambda: nn.LSTM(6, 4, bidirectional=True))
    columns, _ = recurrence(conv(b.images()).mean(2).permute(2, 0, 1))
    words = torch.tensor([[1, 2], [3, 1], [4, 4], [2, 1], [1, 1]])
    loss = F.ctc_loss(head(columns).log_softmax(-1), words, torch.full((5,), 9), torch.full((5,), 2))
    loss.backward()
    return {"loss": loss} | b.gradients(conv) | {f"recurrence {n}": g for n, g in b.gradients(recurrence).items()}


@idiom()
def dilated_branches_see_wide_and_far(b: Bench) -> Found:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=d, dilation=d) for d in (1, 2, 3)])
            self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 4, 1))
            self.out = nn.Conv2d(16, 5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = F.interpolate(self.pool(x), size=x.shape[2:], mode="bilinear", align_corners=False)
            return self.out(torch.cat([*(branch(x) for branch in self.branches), wide], 1))

    net = b.made(Pyramid)
    y = net(b.images())
    F.cross_entropy(y, b.masks(), ignore_index=2).backward()
    nothing = F.cross_entropy(net(b.images()), b.masks() * 0 + 255, ignore_index=255, reduction="sum")
    return {"y": y, "nothing": nothing} | b.gradients(net)


@idiom()
def embeddings_have_sparse_gradients(b: Bench) -> Found:
    sparse = b.made(lambda: nn.Embedding(5, 4, sparse=True))
    small = b.made(lambda: nn.Embedding(5, 4, max_norm=0.5, padding_idx=0, scale_grad_by_freq=True))
    sparse(b.masks()).square().sum().backward()
    small(b.masks()).square().sum().backward()
    torch.optim.SparseAdam(sparse.parameters(), 0.1).step()
    return b.state(sparse) | {f"small {name}": t for name, t in (b.state(small) | b.gradients(small)).items()}


@idiom()
def windows_are_taken_by_strides(b: Bench) -> Found:
    x = normal(5, 3, 7, 9)
    x = b.place(x).requires_grad_()
    n, c, h, w = x.shape
    y = x.as_strided((n, c, h - 1, w - 1, 2, 2), (*x.stride(), *x.stride()[2:]))
    y.square().sum().backward()
    return {"y": y, "dL/dx": x.grad}
