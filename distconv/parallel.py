"""``parallelize``: prepare a module for training on DistTensors with the gradients of a single process.

The layers do not change: DistTensors route their calls to distributed operators. :func:`parallelize` checks that all
ranks have the same model, shards parameters, and registers hooks.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from distconv import recording
from distconv.batch_norm_scope import BATCH_NORM_SCOPES, set_batch_norm_scope
from distconv.communication import agreement, gradient_reduction
from distconv.communication.agreement import check_same_on_all_ranks, try_on_all_ranks
from distconv.communication.digest import find_differing, to_bytes
from distconv.dispatch import add_layer_name
from distconv.distribution import Distribution, default_axes
from distconv.errors import DistconvError, MismatchError, ReplicationWarning, UnsupportedOperation
from distconv.grid import ProcessGrid
from distconv.parameters.channel_split import linear_axes
from distconv.parameters.initialization import has_meta_tensors, initialize_layer
from distconv.parameters.replicas import ReplicaComparison, is_dtensor
from distconv.parameters.sharding import shard_parameters
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
    shard_weights: str | bool | None = None,
    init: Callable[[torch.nn.Module], object] | None = None,
) -> M:
    """Prepare a model for distributed tensors.

    Layers stay as they are. During backward, distconv all-reduces parameter gradients and overlaps this with
    computation. If a grid splits channels (axis ``c``), the weights of its layers are sharded
    (``distconv.parameters.sharding``). With a plan, each layer that the plan names redistributes its input to the
    layer's grid; other layers use the grid of their input.

    Collective: call on every rank, before the optimizer's first step.

    Parameters
    ----------
    model : torch.nn.Module
        The model, with parameters and buffers that are identical on all ranks.
    target : ProcessGrid or Plan
        The grid of all layers, or a plan with a grid for each layer.
    broadcast : bool
        Send the parameters and buffers of rank 0 to all ranks. Otherwise check that they are identical.
    comm : MPI.Intracomm, optional
        The ranks of a plan (default: ``MPI.COMM_WORLD``). Ignored with a grid.
    batch_norm : {"global", "spatial", "local"}, optional
        The values over which batch norm computes its statistics: the full mini-batch, as in a single process
        (``"global"``); the samples of which this rank has a part (``"spatial"``); or this rank's values (``"local"``).
        The default is the plan's, or ``"global"``. ``nn.SyncBatchNorm`` always is global. See
        ``distconv.batch_norm_scope``.
    shard_weights : str or bool, optional
        Axes over which each parameter, its gradient and its optimizer state are sharded, such as ``"n"`` or ``"n,h"``;
        True stands for all axes that would replicate it. The default is the plan's, or False. Layers gather their
        weights before they use them, in forward and in backward, so each pass of a layer is collective, also for plain
        inputs. Layers that a plan does not name keep full parameters.
    init : callable, optional
        Initializes modules whose parameters or buffers are on the device ``meta``, as in
        ``init=lambda module: module.reset_parameters()``. It is called with each such module, in the order of
        ``model.modules()``, after the module's own tensors have memory on torch's default device. A rank has full
        weights of one module at a time, so the model may be too large for a rank.

    Returns
    -------
    torch.nn.Module
        The same ``model``.

    Raises
    ------
    MismatchError
        On every rank, if the models, parameters, buffers or plans differ between ranks.
    PlanError
        On every rank, if the plan does not fit the model or the number of ranks.
    ShapeError
        On every rank, if the groups of a layer do not divide over the ranks that split its channels.
    UnsupportedOperation
        If ``target`` is neither a grid nor a plan, ``batch_norm`` or ``shard_weights`` is invalid, a lazy layer is not
        initialized, a parameter is on the device ``meta`` without ``init`` or is not assigned by it, or
        DistributedDataParallel, FSDP or DTensors already distribute the model.

    Warns
    -----
    ReplicationWarning
        Once, if the model is later trained on plain tensors: then ranks train separate models.

    Examples
    --------
    >>> model = dc.parallelize(Net(), dc.ProcessGrid(n=2, h=2))   # doctest: +SKIP
    """
    if not isinstance(target, (ProcessGrid, Plan)):
        raise UnsupportedOperation(f"parallelize needs a ProcessGrid or a Plan, not {type(target).__name__}")
    scope = batch_norm or (target.batch_norm if isinstance(target, Plan) else "global")
    world = target.world if isinstance(target, ProcessGrid) else (comm or MPI.COMM_WORLD)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    description = "; ".join(
        f"{name} lazy" if is_lazy(x) else f"{name} {tuple(x.shape)} {x.dtype}{' on meta' * x.is_meta}"
        for name, x in state.items()
    )
    # Compared before the checks below, which raise on the ranks that fail them: the models may differ between ranks.
    sharded = "" if shard_weights is None else f", weights sharded over {shard_weights}"
    check_same_on_all_ranks(world, "parallelize", f"{type(model).__name__}, batch norm {scope}{sharded}: {description}")
    if scope not in BATCH_NORM_SCOPES:
        raise UnsupportedOperation(f"parallelize: batch_norm={scope!r} must be one of {', '.join(BATCH_NORM_SCOPES)}")
    _check_initialized(model, init is not None)
    _check_wrappers(model)
    layers, axes = _layers_and_axes(model, target, world, shard_weights)

    def initialize(name: str, module: torch.nn.Module) -> None:
        if init is not None and has_meta_tensors(module):
            # It may fail on one rank only, while the others compare values.
            tensors = try_on_all_ranks(world, lambda: initialize_layer(name, module, init), UnsupportedOperation)
            _broadcast_or_compare(world, tensors, broadcast=broadcast)

    with watchdog.waiting(lambda: "parallelize"):
        plain = {name: x for name, x in state.items() if not isinstance(x, DistTensor) and not x.is_meta}
        _broadcast_or_compare(world, plain, broadcast=broadcast)
        # After the comparison of full parameters, which would not see differences between blocks of different ranks.
        shard_parameters(model, layers, axes, initialize)
    _worlds[model] = world
    set_batch_norm_scope(model, scope)
    # A model may be parallelized again, for example with another plan.
    if world.size > 1 and not any(isinstance(hook, _SamePassCheck) for hook in model._forward_pre_hooks.values()):
        pass_check = _SamePassCheck()
        # prepend: ranks compare their passes before other hooks of the model send messages.
        model.register_forward_pre_hook(pass_check, with_kwargs=True, prepend=True)
        model.register_forward_hook(_PlainTraining(), with_kwargs=True)
        if agreement.level == "all":
            model.register_state_dict_pre_hook(pass_check.state_dict)  # type: ignore[no-untyped-call]
            model.register_load_state_dict_pre_hook(pass_check.load_state_dict)  # type: ignore[no-untyped-call]
    _remove_redistribution_hooks(model)
    if isinstance(target, Plan):
        for layer, grid in layers.values():
            layer.register_forward_pre_hook(_RedistributeInputs(grid), with_kwargs=True)
    for name, parameter in model.named_parameters():
        # shard_parameters has marked sharded parameters. Other tensor subclasses have no gradient that it could reduce.
        # Not isinstance: torch.nn.Parameter's own check accepts any tensor that is marked as a parameter.
        if torch.nn.Parameter in type(parameter).__mro__:
            gradient_reduction.defer_grad_reduction(parameter, name)
    return model


def _layers_and_axes(
    model: torch.nn.Module, target: ProcessGrid | Plan, world: MPI.Intracomm, shard_weights: str | bool | None
) -> tuple[dict[str, tuple[torch.nn.Module, ProcessGrid]], dict[str, str | bool]]:
    """Return the layers of a model with their grids, and the axes over which they shard their weights, by name."""
    if isinstance(target, ProcessGrid):
        layers = {name: (module, target) for name, module in model.named_modules()}
    else:
        layers = {name: (model.get_submodule(name), grid) for name, grid in target.grids(model, world).items()}
        if shard_weights is None:
            return layers, target.sharding(model)
    return layers, dict.fromkeys(layers, shard_weights or False)


def _broadcast_or_compare(world: MPI.Intracomm, tensors: dict[str, torch.Tensor], *, broadcast: bool) -> None:
    """Send the tensors of rank 0 to all ranks, or check that they are the same. Collective: call on every rank."""
    if broadcast:
        for tensor in tensors.values():
            broadcast_tensor(world, tensor)
    else:
        check_same_tensors(world, tensors, "parallelize", ", or pass broadcast=True")


_worlds: WeakKeyDictionary[torch.nn.Module, MPI.Intracomm] = WeakKeyDictionary()
"""The ranks of each parallelized model. A deep copy of a model is not in it."""


def training_comm(model: torch.nn.Module) -> MPI.Intracomm:
    """Return the communicator over which ``model``, or a part of it, was parallelized.

    A job may have ranks that take no part in the training. The default is ``MPI.COMM_WORLD``.

    Parameters
    ----------
    model : Module
        Model, some of whose modules may be parallelized.

    Returns
    -------
    MPI.Intracomm
    """
    worlds = (_worlds[module] for module in model.modules() if module in _worlds)
    world = next(worlds, None)
    # A freed communicator counts as False.
    return world if world and world.size < MPI.COMM_WORLD.size else MPI.COMM_WORLD


def _check_initialized(model: torch.nn.Module, has_init: bool) -> None:
    for name, layer in model.named_modules():
        own = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
        if any(map(is_lazy, own)):
            raise UnsupportedOperation(
                f"parallelize: {name!r} ({type(layer).__name__}) is a lazy layer without parameter shapes. Call the "
                "model once with plain tensors, on every rank with the same seed, and then parallelize it."
            )
        if has_meta_tensors(layer) and not has_init:
            raise UnsupportedOperation(
                f"parallelize: {name!r} ({type(layer).__name__}) is on the device meta, without values. Pass init=, "
                "such as init=lambda module: module.reset_parameters(), which initializes one module at a time."
            )


def _check_wrappers(model: torch.nn.Module) -> None:
    """Check that no other library distributes the parameters or gradients of ``model`` already.

    Raises
    ------
    UnsupportedOperation
        On every rank, for DistributedDataParallel, FSDP and parameters that are DTensors.
    """
    # A model can only be wrapped by FSDP if FSDP has been imported. Importing it here would take half a second.
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


class _SamePassCheck:
    """Hooks of a parallelized model: check that all ranks run the same pass with the same weights.

    A rank that evaluates while others train would silently use their activations, because equal layers send equal
    messages. One all-reduce of 16 bytes for each pass with distributed inputs finds it. :class:`ReplicaComparison`
    sends more in every tenth pass. ``DISTCONV_CHECK=all`` also compares the modes of all submodules, and calls of
    ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self) -> None:
        self._weights = ReplicaComparison()

    def __call__(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        given = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DistTensor)), None)
        if given is None or agreement.level == "off" or given.grid.size == 1:
            return  # Nothing is distributed, so this rank may be the only one that calls the model.
        modes = "train()" if model.training else "eval()"
        if agreement.level == "all":
            others = [name for name, module in model.named_modules() if module.training is not model.training]
            modes += f" but for {', '.join(others)}" if others else ""
        gradients = "" if torch.is_grad_enabled() else ", under no_grad"
        check_same_on_all_ranks(
            given.grid.comparison_comm, f"forward pass of {type(model).__name__}", f"in {modes}{gradients}", _SAME_MODE
        )
        # The comparison reads values, for which a replay on a GPU would have to synchronize.
        if not (recording.active is not None and given.is_cuda):
            trains = model.training and torch.is_grad_enabled()
            recording.call(lambda *_: self._weights.step(model, given.grid.world, trains=trains), given.local)

    def state_dict(self, model: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        if model not in _worlds or keep_vars:
            return
        # Without sharded weights the call is not collective: one rank may make it, such as the one that saves them.
        if any(isinstance(parameter, DistTensor) for parameter in model.parameters()):
            check_same_on_all_ranks(_worlds[model], f"{prefix}state_dict", type(model).__name__)

    def load_state_dict(self, model: torch.nn.Module, state: dict[str, Any], *_: Any) -> None:
        if model in _worlds:  # otherwise the model is a deep copy, which has the hooks but was not parallelized
            check_same_on_all_ranks(_worlds[model], "load_state_dict", f"{type(model).__name__}, {', '.join(state)}")

    def __deepcopy__(self, memo: object) -> _SamePassCheck:
        return _SamePassCheck()


class _PlainTraining:
    """Forward hook of a parallelized model: warns once if the model is trained on plain tensors only.

    It also prevents pickling of the model. On a grid that splits channels a rank has only blocks of weights, so a
    script that pickles its model must fail on every grid.
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
        # DistTensor inputs suffice: a model may gather its output. Without gradients nothing is trained.
        if any(isinstance(x, DistTensor) for x in tensors) or not any(x.requires_grad for x in tensors):
            return
        caller = user_frame(sys._getframe(1))
        warnings.warn_explicit(
            f"{type(model).__name__} was parallelized and is trained on plain tensors: every rank trains on its own "
            "input, and gradients are not all-reduced, so the weights of ranks with different batches diverge. Pass "
            "dc.scatter(x, grid), or dc.from_local(block, dist, shape) for blocks that ranks already have",
            ReplicationWarning,
            caller.f_code.co_filename,
            caller.f_lineno,
        )
        self.warned = True


class _RedistributeInputs:
    """Forward pre-hook of a layer: redistributes its DistTensor arguments to the layer's grid."""

    def __init__(self, grid: ProcessGrid) -> None:
        self.grid = grid

    def __call__(self, layer: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        try:
            moved = {name: self._redistribute(layer, value) for name, value in kwargs.items()}
            return tuple(self._redistribute(layer, value) for value in args), moved
        except DistconvError as error:
            add_layer_name(error)
            raise

    def _redistribute(self, layer: torch.nn.Module, value: Any) -> Any:
        if not isinstance(value, DistTensor):
            return value
        linear = isinstance(layer, torch.nn.Linear)
        axes = linear_axes(value.dim()) if linear else default_axes(None, value.dim())
        return value.redistribute(Distribution(self.grid, axes))

    # A grid cannot be copied: its communicators belong to MPI.
    def __deepcopy__(self, memo: object) -> _RedistributeInputs:
        return self


def _remove_redistribution_hooks(model: torch.nn.Module) -> None:
    """Remove the hooks of an earlier plan, which would redistribute inputs to its grids first."""
    for module in model.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, _RedistributeInputs)]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def broadcast_tensor(world: MPI.Intracomm, tensor: torch.Tensor, root: int = 0) -> None:
    """Overwrite a plain tensor with the values of one rank.

    Collective: call on every rank.

    Parameters
    ----------
    world : MPI.Intracomm
        Communicator of all ranks that call.
    tensor : Tensor
        Of the same shape and dtype on all ranks.
    root : int
        The rank whose values are sent.
    """
    # As bytes: MPI has no type for some dtypes, such as bfloat16.
    values = to_bytes(tensor).copy()
    world.Bcast([values, MPI.BYTE], root=root)
    if world.rank != root:
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(values).view(tensor.dtype).reshape(tensor.shape))


def check_same_tensors(world: MPI.Intracomm, state: dict[str, torch.Tensor], what: str, or_else: str = "") -> None:
    """Check that tensors have the same values on all ranks.

    Collective: call on every rank.

    Parameters
    ----------
    world : MPI.Intracomm
        Communicator of all ranks that call.
    state : dict of str to Tensor
        Parameters and buffers by name, in the same order on all ranks.
    what : str
        The caller, with which the error begins.
    or_else : str
        A further suggestion, with which the error ends.

    Raises
    ------
    MismatchError
        On every rank, with the name of the first tensor that differs.
    """
    wrong = find_differing(world, state, what)
    if wrong:
        raise MismatchError(
            f"{what}: {len(wrong)} of {len(state)} parameters and buffers differ between ranks, the first is "
            f"{next(iter(wrong))!r}. Set the same seed on all ranks before building the model{or_else}."
        )
