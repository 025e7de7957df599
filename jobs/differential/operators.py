"""Draws single operators: geometry, options and shapes, awkward ones on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.jobs.differential.draw import Draw, Program
from distconv.jobs.differential.worlds import Dims, World

_CONVOLUTIONS: dict[int, Callable[..., nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED: dict[int, Callable[..., nn.Module]] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_MAX_POOLS: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOLS: dict[int, Callable[..., torch.Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_ADAPTIVE: dict[str, dict[int, Callable[..., torch.Tensor]]] = {
    "average": {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d},
    "max": {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d},
}
_BATCH_NORMS: dict[int, Callable[..., nn.Module]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}

Operator = Callable[[Draw], Program]


def _reach(kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    return tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))


def _grown(draw: Draw, sizes: tuple[int, ...], padding: tuple[int, ...], reach: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes that windows of this reach fit into, save for a few that torch must refuse."""
    if draw.chance(0.1):
        return sizes
    return tuple(max(size, r - 2 * p) for size, p, r in zip(sizes, padding, reach, strict=True))


def _input(draw: Draw, channels: int, sizes: tuple[int, ...], *, ties: bool = False) -> torch.Tensor:
    return draw.tensor(draw.number(1, 5), channels, *sizes, ties=ties)


def _on_module(draw: Draw, name: str, text: str, module: nn.Module, x: torch.Tensor) -> Program:
    parallel, first, frozen = draw.chance(0.5), draw.chance(0.15), draw.chance(0.1)
    single = draw.chance(0.02)
    given_x = x[0] if single else x
    module.requires_grad_(not frozen)

    def run(world: World) -> None:
        own = world.model(module, parallel)
        given = world.put(given_x, grad=not first)
        world.differentiate(own(given), x=given)
        world.state(own)

    wanted = "dL/dw only" if first else "dL/dx only" if frozen else ""
    return Program(name, f"x{tuple(given_x.shape)} {text} {wanted}", run, x.dim() - 2)


def _on_function(
    name: str, text: str, function: Callable[..., Any], x: torch.Tensor, spatial: int, dims: Dims = None
) -> Program:
    def run(world: World) -> None:
        given = world.put(x, dims)
        y = function(given)
        if isinstance(y, tuple):
            world.record("second", y[1])
            y = y[0]
        world.differentiate(y, x=given)

    return Program(name, f"x{tuple(x.shape)} {text}", run, spatial)


def convolution(draw: Draw) -> Program:
    """nn.Conv with its padding modes, groups, and string paddings."""
    count = draw.weighted([1, 2, 3], [2, 4, 2])
    kernel = draw.numbers(count, 1, 7 if count < 3 else 4)
    dilation = draw.numbers(count, 1, 3) if draw.chance(0.4) else (1,) * count
    stride = draw.numbers(count, 1, 4) if draw.chance(0.5) else (1,) * count
    reach = _reach(kernel, dilation)
    padding: Any = tuple(draw.number(0, r) for r in reach)
    if draw.chance(0.2):
        padding = "valid" if draw.chance(0.5) else "same"
        stride = (1,) * count if padding == "same" and draw.chance(0.9) else stride
    groups = draw.number(1, 3)
    channels = groups * (1 if draw.chance(0.3) else draw.number(1, 2))
    given = channels + draw.chance(0.02)
    filters = groups * draw.number(1, 3)
    mode = draw.weighted(["zeros", "reflect", "replicate", "circular"], [7, 1, 1, 1])
    around = padding if not isinstance(padding, str) else (0,) * count if padding == "valid" else reach
    sizes = _grown(draw, draw.extents(count), around, reach)
    if mode in ("reflect", "circular") and not draw.chance(0.1):
        limits = [r if padding == "same" else p for p, r in zip(around, reach, strict=True)]
        sizes = tuple(max(size, limit + 1) for size, limit in zip(sizes, limits, strict=True))
    text = f"K{kernel} s{stride} p{padding} d{dilation} g{groups} F{filters} {mode}"
    try:
        module = _seeded(draw, lambda: _CONVOLUTIONS[count](
            channels, filters, kernel, stride, padding, dilation, groups, draw.chance(0.7), mode))  # fmt: skip
    except ValueError:
        return convolution(draw)
    return _on_module(draw, "convolution", text, module, _input(draw, given, sizes))


def transposed_convolution(draw: Draw) -> Program:
    """nn.ConvTranspose with output padding."""
    count = draw.weighted([1, 2, 3], [2, 4, 2])
    kernel = draw.numbers(count, 1, 5 if count < 3 else 3)
    dilation = draw.numbers(count, 1, 3) if draw.chance(0.3) else (1,) * count
    stride = draw.numbers(count, 1, 4)
    padding = tuple(draw.number(0, k - 1) for k in kernel)
    limits = [max(s, d) - (not draw.chance(0.05)) for s, d in zip(stride, dilation, strict=True)]
    extra = tuple(draw.number(0, limit) for limit in limits)
    groups = draw.number(1, 2)
    channels, filters = groups * draw.number(1, 2), groups * draw.number(1, 2)
    sizes = draw.numbers(count, 1, 12 if count < 3 else 6)
    module = _seeded(draw, lambda: _TRANSPOSED[count](
        channels, filters, kernel, stride, padding, extra, groups, draw.chance(0.7), dilation))  # fmt: skip
    text = f"K{kernel} s{stride} p{padding} op{extra} d{dilation} g{groups} F{filters}"
    return _on_module(draw, "transposed convolution", text, module, _input(draw, channels, sizes))


def _seeded(draw: Draw, build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(draw.seed)
    return build().double()


def _windows(draw: Draw, count: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    kernel = draw.numbers(count, 1, 5 if count < 3 else 3)
    stride = draw.numbers(count, 1, 4) if draw.chance(0.6) else kernel
    padding = tuple(draw.number(0, k // 2 + (draw.chance(0.02))) for k in kernel) if draw.chance(0.6) else (0,) * count
    return kernel, stride, padding


def max_pool(draw: Draw) -> Program:
    """Max pooling; values with ties, sometimes indices or a NaN."""
    count = draw.weighted([1, 2, 3], [2, 4, 2])
    kernel, stride, padding = _windows(draw, count)
    dilation = draw.numbers(count, 1, 3) if draw.chance(0.3) else (1,) * count
    sizes = _grown(draw, draw.extents(count), padding, _reach(kernel, dilation))
    options = {"ceil_mode": draw.chance(0.4), "return_indices": draw.chance(0.2)}
    x = _input(draw, draw.number(1, 3), sizes, ties=draw.chance(0.5))
    if draw.chance(0.05):
        x.view(-1)[draw.number(0, x.numel() - 1)] = torch.nan

    def pool(given: torch.Tensor) -> Any:
        return _MAX_POOLS[count](given, kernel, stride, padding, dilation, **options)

    return _on_function("max pooling", f"K{kernel} s{stride} p{padding} d{dilation} {options}", pool, x, count)


def average_pool(draw: Draw) -> Program:
    """Average pooling with all that changes its divisor."""
    count = draw.weighted([1, 2, 3], [2, 4, 2])
    kernel, stride, padding = _windows(draw, count)
    sizes = _grown(draw, draw.extents(count), padding, kernel)
    options: dict[str, Any] = {"ceil_mode": draw.chance(0.4), "count_include_pad": draw.chance(0.5)}
    if count > 1 and draw.chance(0.3):
        options["divisor_override"] = draw.number(1, 7)

    def pool(given: torch.Tensor) -> torch.Tensor:
        return _AVERAGE_POOLS[count](given, kernel, stride, padding, **options)

    text = f"K{kernel} s{stride} p{padding} {options}"
    return _on_function("average pooling", text, pool, _input(draw, draw.number(1, 3), sizes), count)


def adaptive_pool(draw: Draw) -> Program:
    """Adaptive pooling, to one value (global) half of the time."""
    count = draw.number(1, 3)
    kind = draw.pick("average", "max")
    size = (1,) * count if draw.chance(0.5) else draw.numbers(count, 1, 6)
    x = _input(draw, draw.number(1, 3), draw.extents(count), ties=draw.chance(0.3))
    return _on_function(
        "adaptive pooling", f"{kind} to {size}", lambda given: _ADAPTIVE[kind][count](given, size), x, count
    )


def batch_norm(draw: Draw) -> Program:
    """Batch norm in training or evaluation, two steps so that running statistics matter."""
    count = draw.number(1, 3)
    channels = draw.number(1, 4)
    options: dict[str, Any] = {
        "affine": draw.chance(0.7),
        "momentum": draw.pick(0.1, 0.3, None),
        "track_running_stats": draw.chance(0.8),
    }
    module = _seeded(draw, lambda: _BATCH_NORMS[count](channels, **options))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    module.train(draw.chance(0.7))
    x = _input(draw, channels, draw.extents(count)) * 3 + 1
    first = draw.tensor(*x.shape)
    parallel = draw.chance(0.5)

    def run(world: World) -> None:
        own = world.model(module, parallel)
        own(world.put(first, grad=False))
        given = world.put(x)
        world.differentiate(own(given), x=given)
        world.state(own)

    text = f"x{tuple(x.shape)} {options} {'training' if module.training else 'evaluation'}"
    return Program("batch norm", text, run, count)


def interpolation(draw: Draw) -> Program:
    """F.interpolate up and down, by size or scale factor."""
    count = draw.number(1, 3)
    linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[count]
    mode = draw.weighted(["nearest", linear, "nearest-exact", "area", "bicubic"], [5, 6, 1, 1, 0.5 * (count == 2)])
    options: dict[str, Any] = {"mode": mode}
    if mode in (linear, "bicubic"):
        options["align_corners"] = draw.chance(0.5)
    if draw.chance(0.5):
        options["size"] = draw.numbers(count, 1, 20 if count < 3 else 8)
    elif draw.chance(0.5):
        options["scale_factor"] = draw.pick(2, 3, 2.0, 0.5)
    else:
        options["scale_factor"] = tuple(draw.pick(0.5, 1.0, 1.3, 1.5, 2.0, 2.6, 3.0) for _ in range(count))
        if draw.chance(0.3):
            options["recompute_scale_factor"] = draw.chance(0.5)
    sizes = draw.numbers(count, 1, 12 if count < 3 else 6)
    if mode == "nearest" and _torch_errs(sizes, options.get("scale_factor")):
        options["recompute_scale_factor"] = True
    x = _input(draw, draw.number(1, 3), sizes)
    return _on_function("interpolation", f"{options}", lambda given: F.interpolate(given, **options), x, count)


def _torch_errs(sizes: tuple[int, ...], scales: Any) -> bool:
    """Whether torch's gradient of nearest interpolation is not the adjoint of its forward.

    Its backward takes an output of the input's extent, or twice that, for a scale of just 1 or 2.
    """
    if not isinstance(scales, tuple):
        return False
    return any(int(n * s) in (n, 2 * n) and s not in (1.0, 2.0) for n, s in zip(sizes, scales, strict=True))


def padding(draw: Draw) -> Program:
    """F.pad in its four modes; constant pads may be negative."""
    count = draw.number(1, 3)
    mode = draw.pick("constant", "reflect", "replicate", "circular")
    sizes = draw.extents(count)
    pads: list[int] = []
    for size in reversed(sizes):
        limit = {"constant": 4, "replicate": 5, "reflect": size - 1, "circular": size}[mode] + draw.chance(0.02)
        low = -(size // 2) if mode == "constant" and draw.chance(0.3) else 0
        pads += draw.numbers(2, low, max(low, min(limit, 6)))
    if mode == "constant" and draw.chance(0.3):
        pads = pads[:2]
    value = draw.pick(0.0, 1.5) if mode == "constant" else None
    x = _input(draw, draw.number(1, 3), sizes)
    return _on_function("pad", f"{mode} {pads} {value}", lambda given: F.pad(given, pads, mode, value), x, count)


def concatenation(draw: Draw) -> Program:
    """cat and stack of two or three tensors, each in a distribution of its own; some are plain."""
    count = draw.number(1, 3)
    shape = [draw.number(1, 5), draw.number(1, 3), *draw.extents(count)]
    stacked = draw.chance(0.2)
    dim = draw.number(0, count + 1) if draw.chance(0.5) else 1
    shapes = [list(shape) for _ in range(draw.number(1, 3))]
    if not stacked:
        for changed in shapes:
            changed[dim] = draw.number(1, 6)
    values = [draw.tensor(*each) for each in shapes]
    plain = [i > 0 and draw.chance(0.15) for i in range(len(values))]
    signed = dim - draw.pick(0, count + 2 + stacked)

    def run(world: World) -> None:
        parts = [world.plain(v) if p else world.put(v) for v, p in zip(values, plain, strict=True)]
        y = (torch.stack if stacked else torch.cat)(parts, signed)
        world.differentiate(y, **{f"x{i}": part for i, part in enumerate(parts)})

    text = f"{'stack' if stacked else 'cat'} {[tuple(s) for s in shapes]} dim={signed} plain={plain}"
    return Program("cat, stack", text, run, count)


_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "x.sigmoid()": torch.Tensor.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "2 / (x * x + 1) - 3": lambda x: 2 / (x * x + 1) - 3,
    "x ** 3": lambda x: x**3,
    "-x.exp()": lambda x: -x.exp(),
    "relu in place": lambda x: F.relu(x * 2, inplace=True),
    "x + 1, then *= x": lambda x: (x + 1).mul_(x),
    "where(x > 0, x, 2 x)": lambda x: torch.where(x > 0, x, 2 * x),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, -1.0),
    "detach": lambda x: x * x.detach(),
}

_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "a - b": lambda a, b: a - b,
    "mul": torch.mul,
    "a / (b b + 1)": lambda a, b: a / (b * b + 1),
    "maximum": torch.maximum,
    "where(a > b, a, b)": lambda a, b: torch.where(a > b, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "add(alpha=2)": lambda a, b: torch.add(a, b, alpha=2),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "atan2": torch.atan2,
}


def unary(draw: Draw) -> Program:
    """One tensor, element by element."""
    name = draw.pick(*_UNARY)
    count = draw.number(1, 3)
    return _on_function("elementwise", name, _UNARY[name], _input(draw, draw.number(1, 3), draw.extents(count)), count)


def binary(draw: Draw) -> Program:
    """Two tensors that broadcast; each of them may be plain, and have fewer dimensions."""
    name = draw.pick(*_BINARY)
    count = draw.number(1, 3)
    shape = (draw.number(1, 5), draw.number(1, 3), *draw.extents(count))
    axes = ("n", "c", *("d", "h", "w")[3 - count :])
    shapes = [tuple(1 if draw.chance(p) else n for n in shape) for p in (0.08, 0.35)]
    starts = [draw.number(0, count + 1) if draw.chance(p) else 0 for p in (0.04, 0.3)]
    values = [draw.tensor(*s[start:]) for s, start in zip(shapes, starts, strict=True)]
    plain = draw.weighted([(False, False), (False, True), (True, False)], [6, 3, 1])
    turned = draw.chance(0.3)

    def run(world: World) -> None:
        a, b = (
            world.plain(v) if p else world.put(v, axes[start:])
            for v, p, start in zip(values, plain, starts, strict=True)
        )
        world.differentiate(_BINARY[name](b, a) if turned else _BINARY[name](a, b), a=a, b=b)

    text = f"{name} {[tuple(v.shape) for v in values]} plain={plain}"
    return Program("elementwise, two", text, run, count)


def cross_entropy(draw: Draw) -> Program:
    """Cross entropy of classes or probabilities, per sample or per pixel."""
    count = draw.number(0, 3)
    samples, classes, sizes = draw.number(1, 6), draw.number(2, 5), draw.extents(count)
    logits = draw.tensor(samples, classes, *sizes)
    options: dict[str, Any] = {"reduction": draw.weighted(["mean", "sum", "none"], [4, 1, 1])}
    if draw.chance(0.3):
        options["label_smoothing"] = 0.1
    probabilities = draw.chance(0.15)
    axes = ("n", *("d", "h", "w")[3 - count :])
    dims: tuple[str | None, ...] = axes
    if probabilities:
        target, dims = draw.tensor(*logits.shape).softmax(1), ("n", None, *axes[1:])
    else:
        target = draw.classes(samples, *sizes, below=classes)
        if draw.chance(0.5):
            ignored = draw.pick(-100, 0, 1)
            options["ignore_index"] = ignored
            target = torch.where(draw.tensor(samples, *sizes) > draw.pick(0.5, -0.5, -9), ignored, target)
    weight = draw.tensor(classes).abs() + 0.1 if draw.chance(0.4) else None

    def run(world: World) -> None:
        x = world.put(logits, ("n", None, *axes[1:]))
        given = None if weight is None else world.plain(weight, grad=False)
        world.differentiate(F.cross_entropy(x, world.put(target, dims, grad=False), given, **options), x=x)

    text = f"x{tuple(logits.shape)} {options} weight={weight is not None} probabilities={probabilities}"
    return Program("cross entropy", text, run, max(count, 1))


def binary_cross_entropy(draw: Draw) -> Program:
    """BCE with logits; weights of several shapes."""
    count = draw.number(1, 3)
    channels, sizes = draw.number(1, 3), draw.extents(count)
    x = _input(draw, channels, sizes)
    target = draw.classes(*x.shape, below=2).double()
    reduction = draw.weighted(["mean", "sum", "none"], [4, 1, 1])
    pos_weight = draw.tensor(channels, *(1,) * count).abs() if draw.chance(0.4) else None
    shape = draw.pick(tuple(x.shape), (channels, *(1,) * count), (1,))
    weight = draw.tensor(*shape).abs() if draw.chance(0.4) else None
    split = weight is not None and weight.shape == x.shape and draw.chance(0.7)

    def run(world: World) -> None:
        given = world.put(x)
        own_weight = None if weight is None else world.put(weight, grad=False) if split else weight
        loss = F.binary_cross_entropy_with_logits(
            given, world.put(target, grad=False), own_weight, reduction=reduction, pos_weight=pos_weight
        )
        world.differentiate(loss, x=given)

    shapes = [None if w is None else tuple(w.shape) for w in (weight, pos_weight)]
    return Program("BCE with logits", f"x{tuple(x.shape)} {reduction} weights={shapes} split={split}", run, count)


def other_loss(draw: Draw) -> Program:
    """MSE, L1 and their kin."""
    losses: list[Callable[..., torch.Tensor]] = [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss]
    function = draw.pick(*losses, F.binary_cross_entropy)
    count = draw.number(1, 3)
    reduction = draw.weighted(["mean", "sum", "none"], [4, 1, 1])
    x = _input(draw, draw.number(1, 3), draw.extents(count))
    target = draw.tensor(*x.shape).sigmoid()

    def run(world: World) -> None:
        given, wanted = world.put(x), world.put(target)
        y = function(given.sigmoid(), wanted.detach(), reduction=reduction)
        world.differentiate(y, x=given)

    return Program(
        "other losses", f"{getattr(function, '__name__', function)} x{tuple(x.shape)} {reduction}", run, count
    )


def linear(draw: Draw) -> Program:
    """nn.Linear on samples, or on the last of several dimensions."""
    samples, inputs, outputs = draw.numbers(3, 1, 8)
    module = _seeded(draw, lambda: nn.Linear(inputs, outputs, draw.chance(0.7)))
    between = draw.numbers(draw.weighted([0, 1, 2], [6, 1, 1]), 1, 9)
    x = draw.tensor(samples, *between, inputs)
    dims = ("n", *("h", "w")[2 - len(between) :], None)
    parallel = draw.chance(0.5)

    def run(world: World) -> None:
        own, given = world.model(module, parallel), world.put(x, dims)
        world.differentiate(own(given), x=given)
        world.state(own)

    return Program("linear", f"x{tuple(x.shape)} -> {outputs}", run, max(len(between), 1))


def reduction(draw: Draw) -> Program:
    """Reductions over some dimensions, or all."""
    count = draw.number(1, 3)
    x = _input(draw, draw.number(1, 3), draw.extents(count), ties=draw.chance(0.2))
    name = draw.weighted(["mean", "sum", "amax", "var", "norm"], [4, 4, 1, 1, 1])
    options: dict[str, Any] = {}
    dims = draw.some(range(count + 2), count + 2)
    if dims:
        signed = [d - draw.pick(0, count + 2) for d in dims]
        options["dim"] = signed[0] if len(dims) == 1 and draw.chance(0.5) else tuple(signed)
        options["keepdim"] = draw.chance(0.5)
    return _on_function("reductions", f"{name} {options}", lambda given: getattr(given, name)(**options), x, count)


def shaping(draw: Draw) -> Program:
    """Operators that only move elements."""
    count = draw.number(1, 3)
    x = _input(draw, draw.pick(1, 2, 4), draw.extents(count))
    n, c, *sizes = x.shape
    dim = draw.number(0, count + 1)
    start = draw.number(0, x.shape[dim] - 1)
    stop = draw.number(start + 1, x.shape[dim])
    order = draw.some(range(count + 2), count + 2)
    order += [d for d in range(count + 2) if d not in order]
    options: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "flatten(1)": lambda t: t.flatten(1),
        "view(n, -1)": lambda t: t.view(t.shape[0], -1) if t.is_contiguous() else t.reshape(t.shape[0], -1),
        "reshape(n, c, -1)": lambda t: t.reshape(n, c, -1),
        "reshape(n c, 1, ...)": lambda t: t.reshape(n * c, 1, *sizes),
        "unsqueeze": lambda t: t.unsqueeze(dim),
        "squeeze(1)": lambda t: t.squeeze(1),
        f"permute{order}": lambda t: t.permute(order),
        "transpose": lambda t: t.transpose(1, -1),
        f"[dim {dim}, {start}:{stop}]": lambda t: t[(slice(None),) * dim + (slice(start, stop),)],
        f"narrow({dim}, {start})": lambda t: t.narrow(dim, start, stop - start),
        "[:, 0]": lambda t: t[:, 0],
        "chunk(2, 1)": lambda t: t.chunk(2, 1)[0],
        f"flip({dim})": lambda t: t.flip(dim),
        "expand": lambda t: t.unsqueeze(0).expand(2, *t.shape),
        f"roll({dim})": lambda t: t.roll(1, dim),
    }
    name = draw.pick(*options)
    return _on_function("shaping", name, options[name], x, count)


def further(draw: Draw) -> Program:
    """What models also call; an operator without a rule must say so."""
    count = draw.number(1, 2)
    x = _input(draw, 4, draw.extents(count))
    options: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "softmax(1)": lambda t: t.softmax(1),
        "log_softmax(1)": lambda t: F.log_softmax(t, dim=1),
        "softmax(-1)": lambda t: t.softmax(-1),
        "group_norm": lambda t: F.group_norm(t, 2),
        "instance_norm": lambda t: F.instance_norm(t),
        "layer_norm": lambda t: F.layer_norm(t, t.shape[1:]),
        "cumsum": lambda t: t.cumsum(-1),
        "sort": lambda t: t.sort(-1)[0],
        "matmul": lambda t: t @ t.transpose(-1, -2),
        "dropout(p=0)": lambda t: F.dropout(t, 0.0),
        "max(1)": lambda t: t.max(1)[0],
        "argmax(1)": lambda t: t.argmax(1),
        "einsum": lambda t: torch.einsum("nc...,nc...->n...", t, t),
        "unfold": lambda t: t.unfold(-1, 1, 1),
        "std": lambda t: t.std(),
        "topk": lambda t: t.topk(1, 1)[0],
        "pixel_shuffle": lambda t: F.pixel_shuffle(t, 2),
    }
    name = draw.pick(*options)
    return _on_function("further", name, options[name], x, count)


OPERATORS: dict[Operator, float] = {
    convolution: 12,
    transposed_convolution: 5,
    max_pool: 5,
    average_pool: 5,
    adaptive_pool: 3,
    batch_norm: 4,
    interpolation: 5,
    padding: 4,
    concatenation: 3,
    unary: 2,
    binary: 4,
    cross_entropy: 4,
    binary_cross_entropy: 2,
    other_loss: 1,
    linear: 2,
    reduction: 2,
    shaping: 2,
    further: 1,
}
"""Operators and how often they are drawn."""


def draw(source: Draw) -> Program:
    """One operator with its input."""
    return source.weighted(list(OPERATORS), list(OPERATORS.values()))(source)
