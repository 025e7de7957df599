"""State that modules keep between calls is in one table, with its lifetime."""

from __future__ import annotations

import ast

from tests.structure.modules import SOURCES, parsed

STATE = {
    "distconv.autograd.recomputation.active": "checkpointed blocks that run; empty when none does",
    "distconv.batch_norm_scope._calls": "calls of models with other statistics; empty outside of calls",
    "distconv.capture.captured._failed_replays": "replays that failed: messages may still use their memory",
    "distconv.checkpoint.lock._held": "locks of folders, for the life of the process",
    "distconv.checkpoint.verification._verified": "state of verified checkpoints; as long as their folders exist",
    "distconv.communication.agreement._compares_first": "False while steps are measured",
    "distconv.communication.gpu.nccl._channels": "weak: NCCL's communicators, for the watchdog",
    "distconv.communication.gradient_reduction._no_sync": "whether no_sync is on",
    "distconv.communication.gradient_reduction._unsynced": "gradients that no_sync keeps; until the next sum",
    "distconv.communication.gradient_reduction._deferred_comparisons": "weights to compare; until the next backward",
    "distconv.communication.gradient_reduction._abandoned": "buffers of sums that a failed pass started",
    "distconv.communication.gradient_reduction._running": "weak: backward passes under way",
    "distconv.communication.transport._abandoned": "messages that nobody waits for; until they have come",
    "distconv.communication.transport._counting": "counters that are entered",
    "distconv.communication.transport._unposted": "messages that are not handed to MPI yet",
    "distconv.dispatch._FALLBACK": "the rule of functions without one; set when layers are imported",
    "distconv.dispatch._SINGLE_RANK": "the function for grids of one rank; set when layers are imported",
    "distconv.dispatch._RULES": "the rules of operators; set when layers are imported",
    "distconv.local_device._local_rank": "this rank's number on its node; asked for once",
    "distconv.parallel._worlds": "weak: the ranks that train each model",
    "distconv.parameters.sharding._optimizer_hook_registered": "true once a parameter is sharded",
    "distconv.process.endings._channels": "the channels that coordinate exits; one for each group of ranks",
    "distconv.process.endings._exit_callbacks": "callbacks at the end of the process",
    "distconv.process.endings._process": "the process that opened the channel, not a fork of it",
    "distconv.process.endings._user_hook": "the user's excepthook from before the first grid",
    "distconv.process.endings._user_thread_hook": "the user's excepthook of threads",
    "distconv.process.memory.allocator.kind": "which allocator this process has",
    "distconv.process.patches._PATCHES": "what is replaced in torch; for the life of the process",
    "distconv.process.patches._start_callbacks": "patches that depend on the loaded modules of torch",
    "distconv.process.startup._started_ranks": "number of ranks that this process has started with",
    "distconv.process.stop_requests._abandoned": "pending allreduces of failed trainings; MPI may write to them",
    "distconv.process.watchdog._wait_sources": "functions from which the watchdog's thread gets more waits",
    "distconv.process.watchdog._stopped": "True once MPI is about to end",
    "distconv.process.watchdog.waits": "the current wait of each thread",
    "distconv.jobs.planning.package_memory._package_bytes": "what imports of models weighed, where plans are made",
    "distconv.kernels.jacobian.csr._known": "weak: patterns of sparse matrices that live",
    "distconv.kernels.scan.accounting._recordings": "lists of steps that are being written",
    "distconv.kernels.scan.accounting._stage": "the phase of a scan whose steps are being written",
    "distconv.layers.common.call_site._warned": "lines that were warned of; for the life of the process",
    "distconv.layers.common.call_site._warned_in": "weak: the same by module",
    "distconv.perfmodel.cost.operation_work._registered": "costs of users' own operators",
}

CHANGING = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "set", "setdefault"}
CHANGING |= {"update"}


def changed_names(tree: ast.Module) -> set[str]:
    """Names of a module that its functions rebind, write into, or change by a method."""
    top = {
        target.id
        for statement in tree.body
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        and not isinstance(statement.value, (ast.Name, type(None)))
        for each in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        for target in ast.walk(each)
        if isinstance(target, ast.Name)
    }
    found: set[str] = set()
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                found |= set(node.names)
            if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
                found |= {node.value.id} if isinstance(node.value, ast.Name) else set()
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
                found |= {node.func.value.id} if isinstance(node.func.value, ast.Name) else set()
        found -= {argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)} - top
    return found & top


def test_what_counts_as_state():
    source = """
a, b, c, d = [], {}, 0, {}
e = math
def f(x):
    global c
    x.append(1); a.append(1); b[0] = 1; d.get(0); e.add(1)
"""
    assert changed_names(ast.parse(source)) == {"a", "b", "c"}


def test_the_table_has_all_of_it_and_no_more():
    found = {f"{module}.{name}" for module in SOURCES for name in changed_names(parsed(module))}
    assert found == STATE.keys()
