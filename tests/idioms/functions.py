"""Autograd Functions, closures, straight-through estimators, and torch.func."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom


def classified(b: Bench, layer: Any) -> Found:
    """Gradients of the classifier with ``layer`` between its features and its head."""
    maps = layer(b.model.features(b.images()))
    F.cross_entropy(b.model.head(b.model.hidden(maps.mean((2, 3)))), b.labels()).backward()
    return b.gradients() | {"maps": maps}


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        s = torch.sigmoid(ctx.saved_tensors[0])
        return g * (s * (1 + ctx.saved_tensors[0] * (1 - s)))


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return g.neg() * ctx.weight, None


class Shake(torch.autograd.Function):
    """Other random shares forward than backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        share = torch.rand(x.size(0), 1, 1, 1, dtype=x.dtype)
        return share * x + (1 - share) * y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        share = torch.rand(g.size(0), 1, 1, 1, dtype=g.dtype)
        return share * g, (1 - share) * g


class Sums(torch.autograd.Function):
    """Two results, one of them without a gradient, from a tensor and an option."""

    @staticmethod
    def forward(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x.cumsum(dim), x.argmax(dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dim = inputs[1]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
        return g.flip(ctx.dim).cumsum(ctx.dim).flip(ctx.dim), None


@idiom(quick=True)
def a_rounding_function_lets_gradients_pass(b: Bench) -> Found:
    return classified(b, Round.apply)


@idiom()
def an_activation_saves_less_for_its_backward_pass(b: Bench) -> Found:
    return classified(b, Swish.apply)


@idiom()
def a_domain_classifier_sees_reversed_gradients(b: Bench) -> Found:
    maps = b.model.features(b.images())
    domain = b.made(lambda: nn.Linear(6, 2))
    scores = b.model.head(b.model.hidden(maps.mean((2, 3))))
    against = domain(Reverse.apply(maps, 0.3).mean((2, 3)))
    (F.cross_entropy(scores, b.labels()) + F.cross_entropy(against, b.labels() % 2)).backward()
    return b.gradients() | {f"domain {n}": g for n, g in b.gradients(domain).items()}


@idiom()
def branches_are_shaken_by_random_shares(b: Bench) -> Found:
    torch.manual_seed(2)
    return classified(b, lambda x: Shake.apply(x, x.flip(3)))


@idiom()
def a_function_gives_two_results_and_takes_an_option(b: Bench) -> Found:
    places = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        sums, where = Sums.apply(x, 2)
        places.append(where)
        return sums

    return classified(b, layer) | {"places": places[0]}


@idiom("reached by closure")
def a_function_reaches_a_tensor_by_closure(b: Bench) -> Found:
    class Closed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, scale: torch.Tensor) -> torch.Tensor:
            return x * scale

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return (g * x).sum()

    x = b.images()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    Closed.apply(scale).square().sum().backward()
    return {"dL/dscale": scale.grad}


@idiom()
def a_straight_through_estimator_detaches_the_difference(b: Bench) -> Found:
    return classified(b, lambda x: x + ((x > 0.3).double() - x).detach())


@idiom()
def weights_are_binarized(b: Bench) -> Found:
    weight = b.model.second.weight
    scale = weight.abs().mean((1, 2, 3), keepdim=True)
    binary = weight + (scale * weight.sign() - weight).detach()
    maps = F.conv2d(b.model.begin(b.images()), binary, b.model.second.bias, 2, 1)
    maps.square().mean().backward()
    return b.gradients()


@idiom()
def weights_and_activations_are_quantized(b: Bench) -> Found:
    """Quantization-aware training with learned steps."""
    step = nn.Parameter(torch.tensor(0.07, dtype=torch.float64))

    def quantized(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
        x = (x / step).clamp(low, high)
        return ((x.round() - x).detach() + x) * step

    weight = quantized(b.model.second.weight, -8, 7)
    maps = F.conv2d(quantized(b.model.begin(b.images()), 0, 15), weight, b.model.second.bias, 2, 1)
    maps.square().mean().backward()
    return b.gradients() | {"dL/dstep": step.grad}


@idiom()
def activations_are_fake_quantized(b: Bench) -> Found:
    found = classified(b, lambda x: torch.fake_quantize_per_tensor_affine(x.float(), 0.1, 0, 0, 15).double())
    return found


@idiom()
def a_codebook_replaces_vectors(b: Bench) -> Found:
    """VQ-VAE: the nearest of the codebook, with the commitment loss and a straight-through gradient."""
    book = b.made(lambda: nn.Embedding(8, 6))
    z = b.model.features(b.images())
    flat = z.permute(0, 2, 3, 1).reshape(-1, 6)
    apart = flat.pow(2).sum(1, keepdim=True) + book.weight.pow(2).sum(1) - 2 * flat @ book.weight.t()
    nearest = apart.argmin(1)
    n, _, h, w = z.shape
    q = book(nearest).view(n, h, w, 6).permute(0, 3, 1, 2)
    loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
    q = z + (q - z).detach()
    shares = F.one_hot(nearest, 8).double().mean(0)
    perplexity = torch.exp(-torch.sum(shares * torch.log(shares + 1e-10)))
    (loss + q.square().mean()).backward()
    return b.gradients() | b.gradients(book) | {"perplexity": perplexity, "q": q}


@idiom()
def a_codebook_moves_by_averages(b: Bench) -> Found:
    """VQ-VAE-2: clusters' sizes and sums are buffers."""
    book, size, total = b.place(torch.arange(48.0).double().view(8, 6).cos(), "--"), torch.zeros(8), torch.zeros(8, 6)
    size, total = size.double(), total.double()
    with torch.no_grad():
        for seed in range(2):
            flat = b.model.features(b.images(seed)).permute(0, 2, 3, 1).flatten(0, 2)
            hot = F.one_hot(torch.cdist(flat, book).argmin(1), 8).type(flat.dtype)
            size.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            total.mul_(0.9).add_(hot.t() @ flat, alpha=0.1)
            book = total / (size + 1e-5).unsqueeze(1)
    return {"book": book, "size": size}


@idiom()
def a_function_computes_its_graph_again(b: Bench) -> Found:
    """Memory-efficient blocks: forward without a graph, backward with one."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            with torch.no_grad():
                return F.gelu(x) * x

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = F.gelu(x) * x
            return torch.autograd.grad(y, x, g)[0]

    return classified(b, Again.apply)


@idiom()
def reversible_blocks_add_crosswise(b: Bench) -> Found:
    block = b.made(lambda: nn.ModuleList([nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)]))

    def layer(x: torch.Tensor) -> torch.Tensor:
        first, second = torch.chunk(x, 2, dim=1)
        first = first + block[0](second)
        second = second + block[1](first)
        return torch.cat([first, second], dim=1)

    return classified(b, layer) | {f"block {n}": g for n, g in b.gradients(block).items()}


# -- torch.func and torch.autograd.functional -------------------------------------------------------------------------


@idiom()
def a_model_is_called_with_other_weights(b: Bench) -> Found:
    weights = {n: (p.detach() * 0.5).requires_grad_() for n, p in b.model.named_parameters()}
    F.cross_entropy(torch.func.functional_call(b.model, weights, (b.images(),)), b.labels()).backward()
    return {n: w.grad for n, w in weights.items()}


@idiom()
def the_jacobian_of_a_function_is_taken(b: Bench) -> Found:
    x = b.images()[:1, :1, :2, :2]
    return {"jacobian": torch.autograd.functional.jacobian(lambda t: t**2 + t.sum(), x)}


@idiom()
def the_hessian_is_multiplied_by_a_vector(b: Bench) -> Found:
    x = b.images()
    return {"product": torch.autograd.functional.hvp(lambda t: (t**3).sum(), x, x)[1]}


@idiom()
def a_vector_is_multiplied_by_the_jacobian(b: Bench) -> Found:
    x = b.images()
    y, product = torch.autograd.functional.vjp(
        lambda t: F.avg_pool2d(t**2, 2), x, b.place(torch.ones(5, 3, 3, 4).double())
    )
    return {"y": y, "product": product}


@idiom("below torch's function interface")
def torch_func_takes_gradients(b: Bench) -> Found:
    return {"grad": torch.func.grad(lambda t: (t**3).sum())(b.images())}


@idiom("below torch's function interface")
def torch_func_maps_over_samples(b: Bench) -> Found:
    return {"sums": torch.func.vmap(lambda t: t.sum())(b.images())}


@idiom()
def a_model_is_traced_by_fx(b: Bench) -> Found:
    traced = torch.fx.symbolic_trace(b.model)
    F.cross_entropy(traced(b.images()), b.labels()).backward()
    return b.gradients()


@idiom()
def features_are_taken_from_inner_nodes(b: Bench) -> Found:
    """torchvision's feature extractor: the graph ends at the layers asked for."""
    found: Found = {}
    names = {"norm": "early", "up": "late"}
    for name, module in b.model.named_modules():
        if name in names:
            module.register_forward_hook(lambda m, x, y, key=names[name]: found.__setitem__(key, y))
    b.model.eval()(b.images())
    return found
