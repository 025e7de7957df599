"""One stage of pipelined training without ranks: its weight versions, and the mini-batches in flight on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from distconv.pipeline.stage.buffers import BufferSnapshot
from distconv.pipeline.stage.stage_inputs import StageInput
from distconv.pipeline.stage.structures import Boundary

Gradients = tuple[Tensor | None, ...]
Run = Callable[[Boundary], Boundary]
"""Forward pass of a stage."""
Values = list[Tensor] | None
"""Values for a stage's parameters; None: their present values."""


class _InFlightPass(NamedTuple):
    """State of a stage between the two passes. Without outputs, they are computed again with the stored buffers."""

    inputs: list[StageInput]
    structure: Any
    outputs: Boundary | None
    run: Run
    buffers: BufferSnapshot | None

    def enter(self) -> Boundary:
        """Return the inputs for the stage."""
        return Boundary([entry.enter() for entry in self.inputs], self.structure)


class SerialStage:
    """Weights of one stage, of which ``version`` counts the updates, and the passes in flight on it.

    ``copies`` has old versions of the weights by their number, ``flights`` the passes between forward and backward.
    Parameters whose identities are ``earlier`` belong to another stage.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        earlier: Collection[int] = (),
    ) -> None:
        self.index, self.module = index, module
        self.parameters = [parameter for parameter in module.parameters() if id(parameter) not in earlier]
        self.optimizer = optimizer(self.parameters) if self.parameters else None
        self.version = 0
        self.copies: dict[int, list[Tensor]] = {}
        self.flights: dict[int, _InFlightPass] = {}

    def weights_of(self, version: int) -> Values:
        """Return old or extrapolated weights; None for the newest ones."""
        ahead = version - self.version
        if ahead < 0:
            return self.copies[version]
        # Before the first update, a prediction is the newest version.
        before = self.copies.get(self.version - 1)
        if ahead == 0 or before is None:
            return None
        with torch.no_grad():
            return [torch.add(w, w - b, alpha=ahead) for w, b in zip(self.parameters, before, strict=True)]

    def forward(self, flight: int, values: Boundary, run: Run, weights: Values, keep: bool) -> Boundary:
        """Run a forward pass.

        Parameters
        ----------
        flight : int
            Number of the mini-batch, or of the micro-batch of a synchronous schedule. :meth:`backward` takes the same
            number.
        values : Boundary
            Inputs of the stage.
        run : callable
            Computes the outputs of the stage from its inputs.
        weights : list of Tensor or None
            Weights of the pass; None for the newest ones.
        keep : bool
            True to keep activations for backward. Otherwise only the input is kept, and backward recomputes them.

        Returns
        -------
        Boundary
            The outputs.
        """
        inputs = [StageInput(tensor, first=self.index == 0) for tensor in values.tensors]
        in_flight = _InFlightPass(inputs, values.structure, None, run, None if keep else BufferSnapshot([self.module]))
        if keep:
            with self._with_weights(weights), _aliases(self.parameters):
                outputs = run(in_flight.enter())
            in_flight = in_flight._replace(outputs=outputs)
        else:
            # Copies, since the second run needs the inputs unchanged.
            copies = [entry.value.detach().clone() for entry in inputs]
            with torch.no_grad():
                outputs = run(Boundary(copies, values.structure))
        self.flights[flight] = in_flight
        return outputs

    def backward(self, flight: int, gradients: Gradients, weights: Values) -> Gradients:
        """Run a backward pass from the ``gradients`` of the outputs, and return those of the stage's inputs.

        Gradients of the parameters are accumulated.

        Parameters
        ----------
        flight : int
            Number of the pass.
        gradients : tuple of (Tensor or None)
            Gradients of the stage's outputs.
        weights : list of Tensor or None
            Weights of the pass; None for the newest ones.

        Returns
        -------
        tuple of (Tensor or None)
            Gradients of the stage's inputs.
        """
        in_flight = self.flights.pop(flight)  # which frees its graph
        with self._with_weights(weights):
            outputs = in_flight.outputs
            if outputs is None:
                assert in_flight.buffers is not None
                with in_flight.buffers.rerun():
                    outputs = in_flight.run(in_flight.enter())
            made = outputs.tensors
            pairs = [(o, g) for o, g in zip(made, gradients, strict=True) if o.requires_grad and g is not None]
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return tuple(entry.gradient for entry in in_flight.inputs)

    def update(self, needed_from: int) -> None:
        """Run one optimizer step.

        Copies of the weights are kept from version ``needed_from`` on. The present weights are copied first if they are
        among those versions.
        """
        if needed_from <= self.version:
            self.copies[self.version] = [weight.detach().clone() for weight in self.parameters]
        self.copies = {version: copy for version, copy in self.copies.items() if version >= needed_from}
        if self.optimizer is not None:
            self.optimizer.step()
        self.version += 1

    def clear_gradients(self) -> None:
        """Set the gradients of all parameters to None."""
        for weight in self.parameters:
            weight.grad = None

    @contextmanager
    def _with_weights(self, weights: Values) -> Iterator[None]:
        """Set the parameters to ``weights`` inside the block (None: no change)."""
        if weights is None:
            yield
            return
        # Values are copied, so that saved tensors, which are aliases of the parameters, read the values of this block.
        newest = [weight.detach().clone() for weight in self.parameters]
        _copy(weights, self.parameters)
        try:
            yield
        finally:
            _copy(newest, self.parameters)


@torch.no_grad()
def _copy(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for value, tensor in zip(values, tensors, strict=True):
        tensor.copy_(value)


def _aliases(parameters: Sequence[nn.Parameter]) -> saved_tensors_hooks:
    """Return hooks with which saved weights read as the present weights, without autograd's check of their version.

    Other saved tensors are checked, as without hooks.
    """
    weights = {weight.untyped_storage().data_ptr() for weight in parameters}

    def pack(tensor: Tensor) -> tuple[Tensor, int | None]:
        is_weight = tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in weights
        # Not the tensor itself: an output that its own node saves would form a reference cycle and never be freed.
        return tensor.detach(), None if is_weight else tensor._version

    def unpack(packed: tuple[Tensor, int | None]) -> Tensor:
        tensor, version = packed
        if version not in (None, tensor._version):
            raise RuntimeError(
                f"a {tuple(tensor.shape)} tensor that the backward pass needs was changed in place since its forward; "
                "use the out-of-place operation"
            )
        return tensor

    return saved_tensors_hooks(pack, unpack)
