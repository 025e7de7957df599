"""What drawn programs have in common: inputs, and a module or a function applied to one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distconv.jobs.verification.differential.draw import Draw, Program
from distconv.jobs.verification.differential.worlds import Dims, World


def image(draw: Draw, channels: int, sizes: tuple[int, ...], *, ties: bool = False) -> torch.Tensor:
    """One to five samples; with ``ties`` many values are equal."""
    return draw.tensor(draw.number(1, 5), channels, *sizes, ties=ties)


def seeded(draw: Draw, build: Callable[[], nn.Module]) -> nn.Module:
    """A module in float64 whose parameters depend on the case alone."""
    torch.default_generator.manual_seed(draw.seed)
    return build().double()


def on_module(draw: Draw, name: str, text: str, module: nn.Module, x: torch.Tensor) -> Program:
    """``module`` of ``x``, sometimes of one sample without its dimension, sometimes with a part of the gradients."""
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


def on_function(
    name: str,
    text: str,
    function: Callable[..., Any],
    x: torch.Tensor,
    spatial: int,
    *,
    dims: Dims = None,
    seed: int | None = None,
) -> Program:
    """``function`` of ``x``, whose first result is differentiated; ``seed`` is for those that draw numbers."""

    def run(world: World) -> None:
        given = world.put(x, dims)
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        y = function(given)
        if isinstance(y, tuple):
            for number, other in enumerate(y[1:]):
                world.record(f"result {number + 2}", other)
            y = y[0]
        world.differentiate(y, x=given)

    return Program(name, f"x{tuple(x.shape)} {text}", run, spatial)
