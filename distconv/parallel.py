"""``parallelize``: make an ordinary module train on distributed tensors with exact gradients."""

from __future__ import annotations

import sys
import warnings
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from distconv import recording
from distconv.batch_norm_scope import BATCH_NORM, take
from distconv.communication import agreement, gradient_reduction
from distconv.communication.agreement import check_same_on_all_ranks
from distconv.communication.digest import bytes_of, different
from distconv.dispatch import name_layer
from distconv.distribution import Distribution, default_axes
from distconv.errors import DistconvError, MismatchError, ReplicationWarning, UnsupportedOperation
from distconv.grid import ProcessGrid
from distconv.parameters.channel_split import linear_axes
from distconv.parameters.replicas import WeightComparison, is_dtensor
from distconv.parameters.sharding import shard
from distconv.plan import Plan
from distconv.process import watchdog
from distconv.process.call_stack import user_frame
from distconv.tensor import DistTensor

M = TypeVar("M", bound=torch.nn.Module)

_SAME_MODE = "call train() and eval(), and enter no_grad, on every rank"


def parallelize(
    model: M,
    target: ProcessGrid | Plan,
    *,
    broadcast: bool = False,
    comm: MPI.Intracomm | None = None,
    batch_norm: str | None = None,
) -> M:
    """Prepare ``model`` for tensors distributed over a grid, or as a plan says; returns the same module. Collective.

    Its layers stay as they are: they meet distributed operators through the tensors. Gradients of its parameters are
    from now on summed behind the backward pass. Where the channels are split, weights are sharded
    (distconv.parameters.sharding). With a plan a layer that it names moves its input to the layer's own grid over
    ``comm`` (default: all ranks); what it does not name stays on the grid that its input is on. Parameters and buffers
    must be equal on all ranks; with ``broadcast=True`` rank 0's are sent to the others instead. A model that is then
    trained on plain tensors, which nothing has scattered, says so once in a ReplicationWarning.

    ``batch_norm``: what statistics are taken over, in place of what a plan says: ``"global"``, the whole mini-batch and
    the numbers of one process; ``"spatial"``, the samples that a rank shares; ``"local"``, what it has
    (distconv.batch_norm_scope). ``nn.SyncBatchNorm`` layers stay global.

    Raises
    ------
    MismatchError
        On all ranks, naming the first parameter or buffer that differs between ranks, or if the plans differ.
    PlanError
        On all ranks, if the plan does not fit the model or the number of ranks.
    ShapeError
        On all ranks, if a layer's groups do not divide over the ranks that split its channels.
    UnsupportedOperation
        If ``target`` is neither a grid nor a plan, ``batch_norm`` is none of these, or a lazy layer has not been called
        yet, or a layer is on the device ``meta``.
    """
    if not isinstance(target, (ProcessGrid, Plan)):
        raise UnsupportedOperation(f"parallelize needs a ProcessGrid or a Plan, not {type(target).__name__}")
    over = batch_norm or (target.batch_norm if isinstance(target, Plan) else "global")
    world = target.world if isinstance(target, ProcessGrid) else (comm or MPI.COMM_WORLD)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    described = "; ".join(f"{name} {_described(tensor)}" for name, tensor in state.items())
    # Before the checks: one rank alone may have another model.
    check_same_on_all_ranks(world, "parallelize", f"{type(model).__name__}, batch norm {over}: {described}")
    if over not in BATCH_NORM:
        raise UnsupportedOperation(f"parallelize: batch_norm={over!r} must be one of {', '.join(BATCH_NORM)}")
    _check_initialized(model)
    _check_wrappers(model)
    if isinstance(target, ProcessGrid):
        layers = {name: (module, target) for name, module in model.named_modules()}
    else:
        layers = {name: (model.get_submodule(name), grid) for name, grid in target.grids(model, world).items()}
    plain = {name: tensor for name, tensor in state.items() if not isinstance(tensor, DistTensor)}
    with watchdog.waiting(lambda: "parallelize"):
        if broadcast:
            for tensor in plain.values():
                broadcast_tensor(world, tensor)
        else:
            check_equal(world, plain, "parallelize", ", or pass broadcast=True")
    shard(layers)
    _worlds[model] = world
    take(model, over)
    if world.size > 1 and not any(isinstance(hook, _SameOnAllRanks) for hook in model._forward_pre_hooks.values()):
        same = _SameOnAllRanks()
        model.register_forward_pre_hook(same, with_kwargs=True, prepend=True)
        model.register_forward_hook(_PlainTraining(), with_kwargs=True)
        if agreement.level == "all":
            model.register_state_dict_pre_hook(same.state_dict)  # type: ignore[no-untyped-call]
            model.register_load_state_dict_pre_hook(same.load_state_dict)  # type: ignore[no-untyped-call]
    _forget_moves(model)
    if isinstance(target, Plan):
        for layer, grid in layers.values():
            layer.register_forward_pre_hook(_Move(grid), with_kwargs=True)
    for name, parameter in model.named_parameters():
        # Sharded ones have been marked, and no_sync keeps no shares of what it could not watch.
        if torch.nn.Parameter in type(parameter).__mro__:
            gradient_reduction.mark(parameter, name)
    return model


_worlds: WeakKeyDictionary[torch.nn.Module, MPI.Intracomm] = WeakKeyDictionary()


def ranks_of(model: torch.nn.Module) -> MPI.Intracomm:
    """Return the communicator that ``model``, or a part of it, was parallelized over; else that of all of the job.

    A job may have ranks that take no part in the training.
    """
    worlds = (_worlds[module] for module in model.modules() if module in _worlds)
    world = next(worlds, None)
    return world if world and world.size < MPI.COMM_WORLD.size else MPI.COMM_WORLD


def _described(tensor: torch.Tensor) -> str:
    return "lazy" if is_lazy(tensor) else f"{tuple(tensor.shape)} {tensor.dtype}{' on meta' * tensor.is_meta}"


def _check_initialized(model: torch.nn.Module) -> None:
    for name, layer in model.named_modules():
        own = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
        if any(map(is_lazy, own)):
            raise UnsupportedOperation(
                f"parallelize: {name!r} ({type(layer).__name__}) does not know the shapes of its parameters yet: call "
                "the model once with plain tensors, on every rank with the same seed, and then parallelize it"
            )
        if any(tensor.is_meta for tensor in own):
            raise UnsupportedOperation(
                f"parallelize: {name!r} ({type(layer).__name__}) is on the device meta, without values. Move the model "
                "with to_empty(device=...), initialize or load it, and then parallelize it."
            )


def _check_wrappers(model: torch.nn.Module) -> None:
    """Check that no other library distributes the parameters or gradients of ``model`` already.

    Raises
    ------
    UnsupportedOperation
        On every rank, for DistributedDataParallel, FSDP and parameters that are DTensors.
    """
    # A model can only be wrapped by what has been imported. To import FSDP here would take half a second.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrappers = tuple(filter(None, (getattr(fsdp, n, None) for n in ("FullyShardedDataParallel", "FSDPModule"))))
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedOperation(
                f"parallelize: {name or 'the model'!r} is a TorchScript module, which calls torch below its functions. "
                "Parallelize the model that it was made from"
            )
        if isinstance(module, DistributedDataParallel):
            raise gradient_reduction.ddp_error(f"parallelize: {name or 'the model'!r} is in DistributedDataParallel")
        if isinstance(module, wrappers):
            raise UnsupportedOperation(
                f"parallelize: {name or 'the model'!r} is already sharded by FSDP. Call parallelize first, and FSDP or "
                "fully_shard on its result"
            )
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise UnsupportedOperation(
                f"parallelize: parameter {name!r} is a DTensor, which torch.distributed has placed already. Call "
                "parallelize on the model with plain parameters"
            )


class _SameOnAllRanks:
    """Hooks of a parallelized model: check that all ranks run the same pass with the same weights.

    One allreduce of 16 bytes for each pass with distributed inputs finds a rank that evaluates while others train:
    equal layers send equal messages, so it would compute with their activations. :class:`WeightComparison` sends more
    in every tenth pass. ``DISTCONV_CHECK=all`` compares the modes of all submodules and loads and saves of
    weights, too.
    """

    def __init__(self) -> None:
        self._weights = WeightComparison()

    def __call__(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        given = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DistTensor)), None)
        if given is None or agreement.level == "off" or given.grid.size == 1:
            return  # Nothing is distributed, so this rank may be alone.
        modes = "train()" if model.training else "eval()"
        if agreement.level == "all":
            others = [name for name, module in model.named_modules() if module.training is not model.training]
            modes += f" but for {', '.join(others)}" if others else ""
        gradients = "" if torch.is_grad_enabled() else ", under no_grad"
        check_same_on_all_ranks(
            given.grid.compared, f"forward pass of {type(model).__name__}", f"in {modes}{gradients}", _SAME_MODE
        )
        # A replay on a GPU would have to wait for it.
        if not (recording.active is not None and given.is_cuda):
            trains = model.training and torch.is_grad_enabled()
            recording.call(lambda *_: self._weights.step(model, given.grid.world, trains=trains), given.local)

    def state_dict(self, model: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        if model not in _worlds or keep_vars:
            return
        # Unless weights are gathered one rank may be alone, such as the one that writes them.
        if any(isinstance(parameter, DistTensor) for parameter in model.parameters()):
            check_same_on_all_ranks(_worlds[model], f"{prefix}state_dict", type(model).__name__)

    def load_state_dict(self, model: torch.nn.Module, state: dict[str, Any], *_: Any) -> None:
        if model in _worlds:  # otherwise it is a copy that has not been parallelized
            check_same_on_all_ranks(_worlds[model], "load_state_dict", f"{type(model).__name__}, {', '.join(state)}")

    def __deepcopy__(self, memo: object) -> _SameOnAllRanks:
        return _SameOnAllRanks()


class _PlainTraining:
    """Forward hook of a parallelized model: warns, once, where it is trained and nothing in the call is distributed.

    It also keeps the model from being pickled: on a grid that splits channels a rank has only its blocks, so a script
    that pickles its model must fail on every grid.
    """

    def __init__(self, warned: bool = False) -> None:
        self.warned = warned

    def __deepcopy__(self, memo: object) -> _PlainTraining:
        return _PlainTraining(self.warned)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise UnsupportedOperation(
            "pickle: a parallelized model cannot be pickled (torch.save(model), pickle.dumps(model)), as a rank may "
            "have only blocks of its weights. Call model.state_dict() on all ranks and save that on one, or call "
            "dc.save_checkpoint."
        )

    def __call__(self, model: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.warned or not model.training or isinstance(output, DistTensor):
            return
        tensors = [leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, torch.Tensor)]
        # A model may gather what it returns. Without gradients nothing is trained.
        if any(isinstance(x, DistTensor) for x in tensors) or not any(x.requires_grad for x in tensors):
            return
        caller = user_frame(sys._getframe(1))
        warnings.warn_explicit(
            f"{type(model).__name__} was parallelized and is trained on plain tensors: every rank computes all that it "
            "is given, and gradients are not summed, so ranks with different batches come apart. Pass it "
            "dc.scatter(x, grid), or dc.from_local(block, dist, shape) of blocks that ranks have",
            ReplicationWarning,
            caller.f_code.co_filename,
            caller.f_lineno,
        )
        self.warned = True


class _Move:
    """Forward pre-hook of a layer: brings its distributed arguments to ``grid``, split as their dimensions say."""

    def __init__(self, grid: ProcessGrid) -> None:
        self.grid = grid

    def __call__(self, layer: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        try:
            return tuple(self._moved(layer, a) for a in args), {k: self._moved(layer, v) for k, v in kwargs.items()}
        except DistconvError as error:
            name_layer(error)
            raise

    def _moved(self, layer: torch.nn.Module, value: Any) -> Any:
        if not isinstance(value, DistTensor):
            return value
        linear = isinstance(layer, torch.nn.Linear)
        axes = linear_axes(value.dim()) if linear else default_axes(None, value.dim())
        return value.redistribute(Distribution(self.grid, axes))

    def __deepcopy__(self, memo: object) -> _Move:
        return self


def _forget_moves(model: torch.nn.Module) -> None:
    """Remove what an earlier plan has layers do: it would move their inputs to its grids first."""
    for module in model.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, _Move)]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def broadcast_tensor(world: MPI.Intracomm, tensor: torch.Tensor, root: int = 0) -> None:
    """Make a plain ``tensor`` what it is on rank ``root``. Collective."""
    values = bytes_of(tensor).copy()
    world.Bcast([values, MPI.BYTE], root=root)
    if world.rank != root:
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(values).view(tensor.dtype).reshape(tensor.shape))


def check_equal(world: MPI.Intracomm, state: dict[str, torch.Tensor], what: str, or_else: str = "") -> None:
    """Raise MismatchError on all ranks unless ``state`` has the same values on each of them; ``what`` asks.

    Raises
    ------
    MismatchError
        On all ranks, naming the first that differs.
    """
    wrong = different(world, state, what)
    if wrong:
        raise MismatchError(
            f"{what}: {len(wrong)} of {len(state)} parameters and buffers differ between ranks, the first is "
            f"{next(iter(wrong))!r}; seed all ranks alike before building the model{or_else}"
        )
