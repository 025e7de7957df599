"""Private names of torch that the package uses: one table, checked for the oldest and the newest supported version."""

from __future__ import annotations

import ast
import importlib
import re
from typing import Any

import pytest
import torch

from tests.structure.modules import ROOT, SOURCES, parsed

NAMES = """
torch.Tensor._make_wrapper_subclass torch._C torch._C.DisableTorchFunctionSubclass torch._C.DispatchKey
torch._C.DispatchKey.AutocastCPU torch._C.DispatchKey.AutocastCUDA torch._C.DispatchKey.AutogradFunctionality
torch._C.DispatchKey.AutogradNestedTensor torch._C.DispatchKey.AutogradOther torch._C.DispatchKeySet
torch._C.ScriptFunction torch._C.ScriptMethod torch._C.TensorBase torch._C._ExcludeDispatchKeyGuard
torch._C._are_functorch_transforms_active torch._C._autograd torch._C._autograd._get_sequence_nr
torch._C._autograd._top_saved_tensors_default_hooks
torch._C._current_graph_task_id torch._C._is_any_autocast_enabled torch._C._nn torch._C._nn.linear torch._C._nn.pad
torch._C._select_conv_backend torch._C._storage_Use_Count torch._C._to_dlpack torch._C._will_engine_execute_node
torch._amp_foreach_non_finite_check_and_unscale_ torch._dynamo.convert_frame
torch._dynamo.convert_frame.CatchErrorsWrapper torch._dynamo.types torch._dynamo.types.ConvertFrameReturn
torch._dynamo.types.FrameAction torch._dynamo.types.FrameAction.SKIP torch._dynamo.types.FrameExecStrategy
torch._foreach_copy_ torch._foreach_norm torch._has_compatible_shallow_copy_type torch._make_dual torch._neg_view
torch._nested_tensor_from_mask_left_aligned torch._prims_common torch._prims_common.suggest_memory_format
torch._subclasses.fake_tensor.FakeTensor torch._subclasses.fake_tensor.FakeTensorMode
torch.autograd.Variable._execution_engine torch.autograd.Variable._execution_engine.queue_callback
torch.autograd._make_grads torch.autograd._profiler_enabled torch.autograd.function._SingleLevelFunction
torch.autograd.graph._engine_run_backward torch.autograd.graph._get_grad_fn_or_grad_acc
torch.distributed.checkpoint.filesystem._StorageInfo torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
torch.nn.modules._functions.BackwardHookFunction torch.nn.modules._functions.BackwardHookFunction._backward_cls
torch.nn.modules.batchnorm._BatchNorm torch.nn.modules.batchnorm._BatchNorm.forward torch.nn.modules.conv._ConvNd
torch.nn.modules.conv._ConvTransposeNd torch.nn.modules.utils._pair
torch.nn.parallel.DistributedDataParallel._active_ddp_module torch.ops.aten._unsafe_view
torch.serialization._get_layout torch.testing._internal.common_methods_invocations.op_db
torch.testing._internal.common_modules.module_db torch.utils._python_dispatch.TorchDispatchMode torch.utils._pytree
torch.utils._pytree.TreeSpec torch.utils._pytree.keystr torch.utils._pytree.register_pytree_node
torch.utils._pytree.tree_flatten torch.utils._pytree.tree_flatten_with_path torch.utils._pytree.tree_leaves
torch.utils._pytree.tree_map torch.utils._pytree.tree_map_only torch.utils._pytree.tree_unflatten
torch.utils.checkpoint._CachedTorchDispatchMode torch.utils.checkpoint._CachingTorchDispatchMode
torch.utils.checkpoint._CheckpointFrame torch.utils.checkpoint._CheckpointFrame.save_inputs
torch.utils.checkpoint._StopRecomputationError torch.utils.checkpoint._checkpoint_hook
torch.utils.checkpoint._recomputation_hook
""".split()
"""Private attributes and modules, by the dotted names that the sources have for them.

All are in torch 2.7.0 and 2.13.0, but for those of ``NOT_IN_ALL``.
"""

OF_TENSORS = "_backward_hooks _base _is_zerotensor _use_count _version".split()
"""Private attributes of tensors."""

NOT_IN_ALL = {
    "torch.utils.checkpoint._CheckpointFrame.save_inputs": "since 2.13; older versions do not compare inputs",
}
"""Names that some supported version lacks, which the sources ask for first."""

VERIFICATION = "torch.testing._internal."
"""Prefix of what ``distconv verify`` uses: it needs packages of torch's tests."""


def private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def used_names(tree: ast.Module) -> set[str]:
    """Dotted private names of torch in a module."""
    known, found = {"torch": "torch"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            known |= names
            found |= set(names.values())
    for node in ast.walk(tree):
        root, _, rest = ast.unparse(node).partition(".") if isinstance(node, ast.Attribute) else ("", "", "")
        if root in known and re.fullmatch(r"[\w.]+", rest):
            found.add(f"{known[root]}.{rest}")
    return {name for name in found if name.split(".")[0] == "torch" and private(name)}


def resolve(name: str) -> Any:
    """The module or attribute of this dotted name; raises AttributeError if there is none."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            place: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            place = getattr(place, part)
        return place
    raise AttributeError(name)


def test_the_table_has_all_private_names_of_torch() -> None:
    found = set().union(*map(used_names, map(parsed, SOURCES)))
    assert found == set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(VERIFICATION)])
def test_this_torch_has_the_name(name: str) -> None:
    try:
        resolve(name)
    except AttributeError:
        assert name in NOT_IN_ALL


@pytest.mark.parametrize("name", OF_TENSORS)
def test_tensors_have_the_private_attribute(name: str) -> None:
    assert hasattr(torch.ones(1), name)


def test_the_bounds_of_the_requirement_are_the_versions_that_were_checked() -> None:
    assert '"torch>=2.7,<2.14"' in (ROOT / "pyproject.toml").read_text()
