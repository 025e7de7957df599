"""Execution of one rank's list of actions.

:class:`.Pipeline` decides which actions come next; :class:`.Passes` computes, and :class:`.P2P` sends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
from mpi4py import MPI

from distconv.errors import DistconvError, PipelineError
from distconv.pipeline.schedules.actions import COMPUTE, Action, Kind, Message, Schedule, Weights
from distconv.pipeline.simulation.span import Span
from distconv.pipeline.stage.passes import Microbatch, Passes
from distconv.pipeline.stage.running_statistics import StatisticsRecord
from distconv.pipeline.stage.structures import Boundary

from .replicas import ReplicaRecord, allgather_replicas, has_gradients, sum_gradients
from .shared_weights import SharedWeights
from .topology import Topology


class Executor:
    """Performs the actions of one rank.

    The last stage computes the loss of a micro-batch. The messages of gradients carry it to the stages before.

    Attributes
    ----------
    optimizer : Optimizer or None
    spans : list of Span or None
        Measured passes, if a trace is being recorded.
    losses : dict of int to float
        Losses that have reached this rank, by micro-batch.
    """

    def __init__(
        self, topology: Topology, passes: Passes, optimizer: torch.optim.Optimizer | None, shared: SharedWeights
    ) -> None:
        self.optimizer = optimizer
        self._topology, self._passes, self._shared = topology, passes, shared
        self._clean = False  # True if gradients were set to None since the last update
        self._next: Action | None = None  # the action after the present one, for _is_next
        self._predictions: dict[int, Boundary] | None = None
        self.spans: list[Span] | None = None
        self._do: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.W: self._passes.weight,
            Kind.SEND: self._send,
            Kind.RECEIVE: self._receive,
            Kind.UPDATE: self._update,
            Kind.STASH: lambda action: self._passes.weights.stash(action.version or 0, action.microbatch),
            Kind.PREDICT: lambda action: self._passes.weights.predict(action.version or 0),
        }

    def begin(self, schedule: Schedule) -> None:
        """Start with an empty pipeline that will follow ``schedule`` or a longer one of its kind."""
        self.schedule = schedule
        self._passes.begin(schedule)
        self._microbatches: dict[int, Microbatch] = {}
        # Tensors that arrived for a pass of this stage, or that a pass made and SEND has not sent yet. The chunks of a
        # single stage pass results on here, without messages.
        self._boundary_tensors: dict[Message, Boundary] = {}
        self.losses: dict[int, float] = {}
        """Losses that have reached this rank, by micro-batch."""
        self.input_gradients: dict[int, Boundary] = {}
        """On the first stage: gradients of its inputs, by micro-batch, if the mini-batch requires them."""

    def add_microbatch(self, microbatch: int, feed: Microbatch) -> None:
        """Store a micro-batch before its first action.

        Parameters
        ----------
        microbatch : int
            Its number, counted over all mini-batches.
        feed : Microbatch
            Its input and target.
        """
        self._microbatches[microbatch] = feed

    def perform(self, actions: Sequence[Action]) -> None:
        """Perform some actions in order.

        Parameters
        ----------
        actions : sequence of Action
            Next actions of this rank.

        Raises
        ------
        Exception
            The exception of a stage, loss or optimizer. A note names rank, stage, operation and micro-batch.
        PipelineError
            If an action fails otherwise.
        """
        for action, self._next in zip_longest(actions, actions[1:]):
            try:
                self._wait_for_input(action)  # before the clock starts: spans have no waiting times
                start = time.perf_counter()
                self._do[action.kind](action)
            except PipelineError:
                raise
            except DistconvError as error:
                # Other DistconvErrors are raised on all ranks; callers would not expect this one on a single rank.
                raise PipelineError(f"{_describe(action)}: {type(error).__name__}: {error}") from error
            except Exception as error:
                # As add_note(), which Python 3.10 does not have.
                vars(error).setdefault("__notes__", []).append(_describe(action))
                raise
            if self.spans is not None and action.kind in COMPUTE | {Kind.UPDATE}:
                self.spans.append(Span(action, self._topology.position.replica, start, time.perf_counter()))

    def predict(self, actions: Sequence[Action]) -> dict[int, Boundary]:
        """Perform forward passes without autograd, and the messages between them.

        Parameters
        ----------
        actions : sequence of Action
            Actions of this rank, of which those of backward passes and updates are omitted.

        Returns
        -------
        dict of int to Boundary
            On the last stage: outputs of the model by micro-batch.
        """
        forward = {Kind.F, Kind.SEND, Kind.RECEIVE}
        predictions: dict[int, Boundary] = {}
        self._predictions = predictions
        try:
            self.perform([a for a in actions if a.kind in forward and a.payload is not Kind.B])
        finally:
            self._predictions = None
        return predictions

    def close(self) -> None:
        """Free the communicators of shared weights. Collective: call on every rank."""
        self._shared.close()

    def drop_microbatches(self, before: int) -> None:
        """Drop the data of all micro-batches below ``before``, which are finished."""
        for numbered in (self._microbatches, self.losses):
            for microbatch in [number for number in numbered if number < before]:
                del numbered[microbatch]

    # -- messages -----------------------------------------------------------------------------------------------------

    def _receive(self, action: Action) -> None:
        message = self.schedule.message_of(action)
        assert message is not None and action.peer is not None
        self._topology.p2p.post_receive(message, action.peer)

    def _wait_for_input(self, action: Action) -> None:
        """Wait for the input of ``action`` if it comes from another stage."""
        message = self.schedule.input_of(action)
        if message is None or message in self._boundary_tensors:
            return
        peer = self.schedule.receive_of(message).peer
        assert peer is not None
        what = f"stage {action.stage}: {action.kind} of micro-batch {action.microbatch} waiting for stage {peer}"
        minibatch = self._microbatches[message.microbatch].minibatch
        self._boundary_tensors[message], loss = self._topology.p2p.receive(message, peer, minibatch, what)
        if message.payload is Kind.B:
            self.losses[message.microbatch] = loss

    def _send(self, action: Action) -> None:
        message = self.schedule.message_of(action)
        assert message is not None and action.peer is not None
        # Activations precede the loss, so it is valid in messages of gradients only.
        loss = self.losses.get(message.microbatch, 0.0)
        minibatch = self._microbatches[message.microbatch].minibatch
        self._topology.p2p.send(
            message, action.peer, minibatch, self._boundary_tensors.pop(message), loss=loss, what=str(action)
        )

    # -- passes -------------------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        feed, received = self._pass_input(action)
        run = self._passes.forward if self._predictions is None else self._passes.predict
        outputs = run(action, feed, received)
        message = self.schedule.output_of(action)
        assert action.microbatch is not None
        if message is not None:
            self._boundary_tensors[message] = outputs
        elif self._predictions is not None:
            self._predictions[action.microbatch] = outputs
        else:
            self.losses[action.microbatch] = float(outputs.tensors[0].detach())

    def _backward(self, action: Action) -> None:
        feed, received = self._pass_input(action)
        self._clear_gradients()
        # If W is next, no other stage waits for the first half, so the full backward pass runs at once.
        full = not self.schedule.splits_backward or self._is_next(Kind.W, action)
        gradients = self._passes.backward(action, feed, received, full)
        message = self.schedule.output_of(action)
        if message is not None:
            self._boundary_tensors[message] = gradients
        elif feed.minibatch.needs_gradient:
            assert action.microbatch is not None
            self.input_gradients[action.microbatch] = gradients

    def _pass_input(self, action: Action) -> tuple[Microbatch, Boundary | None]:
        """Return the micro-batch of a pass, and the result of the previous pass in the order of the model.

        That pass is the forward of the part before, or the backward of the part after; None if there is no such part.
        """
        assert action.microbatch is not None
        message = self.schedule.input_of(action)
        return self._microbatches[action.microbatch], None if message is None else self._boundary_tensors.pop(message)

    def _is_next(self, kind: Kind, action: Action) -> bool:
        then = self._next
        return then is not None and (then.kind, then.microbatch, then.chunk) == (kind, action.microbatch, action.chunk)

    # -- updates ------------------------------------------------------------------------------------------------------

    def _clear_gradients(self) -> None:
        """Set gradients to None before the first one after an update.

        Not directly after the update: until the next backward pass, the caller can read the gradients of that update.
        """
        if not self._clean:
            for module in self._passes.modules:
                module.zero_grad(set_to_none=True)
            self._clean = True

    def _update(self, action: Action) -> None:
        self._clear_gradients()  # needed on a replica that had no micro-batch
        statistics, weights = self._passes.statistics, self._passes.weights
        records = [statistics.records]
        if self._topology.replica_comm.size > 1:
            records = self._combine_replicas(action)
        if self._passes.defers_statistics:
            statistics.commit([record for each in records for record in each], self._passes.merges_statistics)
        self._shared.sum_gradients(str(action))
        weights.prepare_update(self.schedule.weights is Weights.PREDICT)
        if self.optimizer is not None:
            self.optimizer.step()
        self._shared.copy_weights(str(action))
        self._clean = False

    def _combine_replicas(self, action: Action) -> list[list[StatisticsRecord]]:
        """Add the gradients of all replicas and exchange losses. Return the statistics records of each. Collective.

        Every replica has an UPDATE to the same version in its list, even if it had no mini-batch. All replicas
        therefore get here.
        """
        parameters = self._passes.weights.parameters
        minibatches = {feed.minibatch.step: feed.minibatch for feed in self._microbatches.values()}
        own = ReplicaRecord(self._passes.statistics.records, self.losses, has_gradients(parameters), minibatches)
        facts = allgather_replicas(self._topology.replica_comm, own, str(action))
        for replica, each in enumerate(facts):
            self.losses.update(each.losses)
            for step, theirs in each.minibatches.items():
                if minibatches.get(step, theirs) != theirs:
                    raise PipelineError(
                        f"{action}: replica {replica} has a mini-batch of {theirs.describe()}, but this rank has "
                        f"{minibatches[step].describe()}; pass the same x and target on all ranks"
                    )
        there = [each.has_gradients for each in facts]
        sum_gradients(self._topology.replica_comm, parameters, there, self._gradient_divisor(action), str(action))
        return [each.records for each in facts]

    def _gradient_divisor(self, action: Action) -> int:
        """Return the divisor of the replicas' gradient sum.

        In asynchronous schedules each replica has its own mini-batch, so the sum is divided by the number of
        mini-batches.
        """
        if action.microbatch is None:
            return 1
        count = self._topology.replica_comm.size
        first = action.microbatch // count * count
        return sum(first + index in self._microbatches for index in range(count))


def _describe(action: Action) -> str:
    return f"rank {MPI.COMM_WORLD.rank}, {action}"
