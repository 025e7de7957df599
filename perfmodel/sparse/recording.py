"""``record``: the operations of a sparse network on the sites of an example."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distconv.kernels.sparse import KernelMap
from distconv.kernels.sparse.coordinates import Offsets
from distconv.layers.sparse import CoordinateManager, SparseTensor
from distconv.layers.sparse.coordinate_manager import Sites, offset_bounds
from distconv.perfmodel.graph.recorder import FunctionRecorder

MapKey = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class SiteWindow:
    """Pairs of input and output sites of a layer.

    Attributes
    ----------
    pairs : KernelMap
    low, high : tuple of int
        Largest distance between the sites of a pair, in each direction.
    key : tuple
        Layers with equal keys share the map.
    """

    pairs: KernelMap
    low: tuple[int, ...]
    high: tuple[int, ...]
    key: MapKey


@dataclass(frozen=True, eq=False, kw_only=True)
class SiteOperation:
    """One operation on the features of sites.

    Attributes
    ----------
    name : str
        Name of the module.
    kind : str
        "convolution", "pooling", "global_pool", "batch_norm", "linear", "pointwise", or "head": a linear layer after
        the sites are pooled.
    inputs, outputs : Sites
        Sites of the input and of the output. A head has none of its own, and stores those of the example.
    channels, filters : int
        Features of each input and output site.
    samples : int
        Samples of the mini-batch, which are the rows of a head.
    parameters : int
        Number of elements of all parameters.
    input_gradient : bool
        True if a gradient of the input is computed. Otherwise False.
    window : SiteWindow or None
        Pairs of sites of a convolution or pooling.
    """

    name: str
    kind: str
    inputs: Sites
    outputs: Sites
    channels: int
    filters: int
    samples: int
    parameters: int = 0
    input_gradient: bool = True
    window: SiteWindow | None = None


@dataclass(frozen=True, eq=False)
class SparseRecording:
    """Operations of a network on an example.

    Attributes
    ----------
    operations : tuple of SiteOperation
        In the order of the forward pass.
    itemsize : int
        Bytes of a feature.
    batch_size : int
        Samples of the example.
    sites : Sites
        Sites of the example.
    """

    operations: tuple[SiteOperation, ...]
    itemsize: int
    batch_size: int
    sites: Sites

    @property
    def dimension(self) -> int:
        """Number of spatial dimensions."""
        return self.sites.coords.shape[1] - 1


def record(model: nn.Module, x: SparseTensor) -> SparseRecording:
    """Run a copy of a model in training mode on an example, and record its operations. Runs on one process.

    Parameters
    ----------
    model : Module
        Sparse network.
    x : SparseTensor
        Example of a mini-batch. It does not change.

    Returns
    -------
    SparseRecording

    Warnings
    --------
    Operations on ``x.features`` outside of layers and functions of sparse tensors are not recorded.
    """
    # A copy, because running statistics change in training mode.
    model = copy.deepcopy(model).train()
    recorder = _SparseRecorder(x.sites, x.batch_size)
    with recorder.record_modules(model), torch.enable_grad():
        model(SparseTensor.on(x.sites, _RecordingManager(recorder), x.features.detach()))
    return SparseRecording(tuple(recorder.operations), x.features.element_size(), x.batch_size, x.sites)


class _SparseRecorder(FunctionRecorder):
    """Records functions of sparse tensors, and linear layers of plain ones."""

    def __init__(self, sites: Sites, samples: int) -> None:
        super().__init__()
        self.sites, self.samples = sites, samples
        self.operations: list[SiteOperation] = []

    def record_operation(
        self, kind: str, inputs: Sites, outputs: Sites, channels: int, filters: int, **more: Any
    ) -> None:
        """Append an operation of the running module."""
        operation = SiteOperation(
            name=self.running_module,
            kind=kind,
            inputs=inputs,
            outputs=outputs,
            channels=channels,
            filters=filters,
            samples=self.samples,
            **more,
        )
        self.operations.append(operation)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, nn.Parameter)]
        if isinstance(result, SparseTensor):
            # torch.cat takes its operands in a list.
            operands = (x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg]))
            sparse = next(x for x in operands if isinstance(x, SparseTensor))
            kind = {F.batch_norm: "batch_norm", F.linear: "linear"}.get(func, "pointwise")
            more = {"parameters": sum(x.numel() for x in given), "input_gradient": sparse.requires_grad}
            self.record_operation(kind, sparse.sites, result.sites, sparse.shape[1], result.shape[1], **more)
        elif func is F.linear:
            filters, channels = args[1].shape
            parameters = sum(x.numel() for x in given)
            self.record_operation("head", self.sites, self.sites, channels, filters, parameters=parameters)
        return result


class _RecordingManager(CoordinateManager):
    """Coordinate manager that records layers with windows, and pooling over all sites.

    A layer with a window calls :meth:`gather_needed`, then :meth:`replicate_parameter` for each parameter, then
    :meth:`wrap_features`. Pooling over all sites calls :meth:`sites_per_sample`, then a sum or a maximum. The first
    call stores what is known of the operation in ``_asked``, and the last one records it. Pruning and broadcasts call
    the last one alone, and are not recorded.
    """

    def __init__(self, recorder: _SparseRecorder) -> None:
        super().__init__(recorder.samples)
        self._recorder = recorder
        self._asked: dict[str, Any] = {}

    def gather_needed(
        self,
        features: torch.Tensor,
        inputs: Sites,
        outputs: Sites,
        offsets: Offsets,
        *,
        transposed: bool = False,
    ) -> tuple[torch.Tensor, KernelMap]:
        """Return the needed features, as in the base class, and store the window."""
        features, pairs = super().gather_needed(features, inputs, outputs, offsets, transposed=transposed)
        low, high = offset_bounds(offsets, (outputs if transposed else inputs).stride, transposed=transposed)
        key = (inputs, outputs, offsets, transposed)
        self._asked = {
            "inputs": inputs,
            "channels": features.shape[1],
            "input_gradient": features.requires_grad,
            "window": SiteWindow(pairs, tuple(low), tuple(high), key),
            "parameters": 0,
        }
        return features, pairs

    def replicate_parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the parameter unchanged, and count its elements."""
        if self._asked:
            self._asked["parameters"] += tensor.numel()
        return tensor

    def wrap_features(self, features: torch.Tensor, sites: Sites) -> torch.Tensor:
        """Return the features unchanged, and record the operation of a layer with a window."""
        asked, self._asked = self._asked, {}
        if asked:
            # Pooling over windows has no parameters.
            kind = "convolution" if asked["parameters"] else "pooling"
            self._recorder.record_operation(kind, outputs=sites, filters=features.shape[1], **asked)
        return features

    def sites_per_sample(self, sites: Sites) -> torch.Tensor:
        """Return the number of sites of each sample. Pooling over all sites calls it first."""
        self._asked = {"inputs": sites, "outputs": sites}
        return super().sites_per_sample(sites)

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values unchanged, and record the operation."""
        return self._pooled(values)

    def max_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values unchanged, and record the operation."""
        return self._pooled(values)

    def _pooled(self, values: torch.Tensor) -> torch.Tensor:
        asked, self._asked = self._asked, {}
        self._recorder.record_operation("global_pool", channels=values.shape[1], filters=values.shape[1], **asked)
        return values
