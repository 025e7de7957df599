"""What a step reads and leaves besides memory: gradients of leaves, and shares of them that are kept under no_sync."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from distconv.communication import gradient_reduction

_GRAD: Any = torch.Tensor.grad
"""``grad`` as autograd has it, past what sums shares first."""

Geometry = tuple[Any, ...]


def gradient(leaf: torch.Tensor) -> torch.Tensor | None:
    """``leaf.grad``, as it is."""
    value: torch.Tensor | None = _GRAD.__get__(leaf)
    return value


def set_gradient(leaf: torch.Tensor, value: torch.Tensor | None) -> None:
    """Let ``leaf.grad`` be ``value``."""
    _GRAD.__set__(leaf, value)


class State:
    """Gradients of leaves and kept shares, as they are when this is made; leaves are added as they are found."""

    def __init__(self) -> None:
        self.leaves: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        """By its id each leaf, and its gradient."""
        self.kept = gradient_reduction.kept()

    def add(self, leaf: torch.Tensor) -> None:
        """Note the gradient of ``leaf``, which nothing has changed yet."""
        if id(leaf) not in self.leaves:
            self.leaves[id(leaf)] = leaf, gradient(leaf)

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """Those of the leaves, in the order in which these were added, and then the kept shares."""
        return [*(grad for _, grad in self.leaves.values()), *(share for _, share, _ in self.kept)]

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it was the gradient of one of the leaves, or a share of one."""
        return any(grad is tensor for grad in self.gradients)

    def put_back(self) -> None:
        """Let gradients and shares be those that they were; what is in their memory is not looked at."""
        for leaf, grad in self.leaves.values():
            set_gradient(leaf, grad)
        gradient_reduction.keep(self.kept)


def geometry(grad: torch.Tensor | None) -> Geometry | None:
    """What a recording depends on of a gradient: whether there is one, and its dtype and layout."""
    return None if grad is None else (grad.dtype, grad.layout)


def described(leaves: Iterable[torch.Tensor]) -> tuple[Any, ...]:
    """The same value as long as a recording serves: which leaves have gradients, and what shares are kept."""
    shares = tuple((id(leaf), comm.handle) for leaf, _, comm in gradient_reduction.kept())
    return tuple([geometry(gradient(leaf)) for leaf in leaves]), shares


def modes() -> dict[str, Any]:
    """Settings of torch and distconv that a step depends on, by what they are called."""
    return {
        "gradients (torch.no_grad)": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": tuple(_autocast(device) for device in ("cpu", "cuda")),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "dc.no_sync": gradient_reduction.keeps(),
        "CUDA's precision": _of_cuda() if torch.cuda.is_initialized() else None,
    }


def _of_cuda() -> Any:
    """What decides which kernels a graph has."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return (
        (cudnn.enabled, cudnn.deterministic, cudnn.allow_tf32, torch.get_float32_matmul_precision()),
        (matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction),
    )


def _autocast(device: str) -> Any:
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
