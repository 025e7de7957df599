"""File and test file: what a module does is tested in the file of its name, in the same place below ``tests/``."""

from __future__ import annotations

from pathlib import Path

from tests.structure.modules import ROOT, SOURCES

SHORT = 60
"""Lines up to which a module may be tested with its neighbours."""

TESTED_ELSEWHERE = {
    "distconv/capture/entries.py": "instructions, which test_recorder.py records and test_program.py runs",
    "distconv/errors.py": "classes without code: each is matched where it is raised",
    "jobs/papers/": "a paper is tested as a whole: its tables against the printed ones, in test_command.py",
    "jobs/verification/conformance/": "the table is run as one: test_command.py",
    "jobs/verification/differential/": "a case passes through all of it: test_runs.py plants faults that it must see",
    "layers/models/": "networks are tested as a list: test_models.py, test_reference_models.py",
}
"""Modules, or folders with all that is below them, and why they have no test file of their name."""

OF_NO_MODULE = {
    "tests/distconv/test_damaged_files.py": "all that read files, given something else",
    "tests/distconv/test_costs.py": "bytes that calls send, sum and keep",
    "tests/distconv/test_cache_keys.py": "keys of all caches",
    "tests/distconv/communication/test_one_rank_alone.py": "all that ranks compare: one of them differs",
    "tests/distconv/test_torch_wrappers.py": "torch's wrappers for data parallelism around parallelized models",
    "tests/docs/test_code_blocks.py": "the pages of docs/: their code",
    "tests/docs/test_console.py": "commands of the pages, and what they print",
    "tests/docs/test_site.py": "the pages as a site",
    "tests/examples/test_examples.py": "the scripts of examples/, over ranks and as plain PyTorch",
    "tests/faults/test_cases.py": "the list of faults: each has a test",
    "tests/faults/test_checkpoint_files.py": "checkpoints on failing disks, in killed jobs, from other times",
    "tests/faults/test_long_runs.py": "shapes and grids that vary for thousands of steps",
    "tests/faults/test_processes.py": "ranks that fail in whole jobs",
    "tests/faults/test_resumed_runs.py": "trainings that go on with other ranks and grids",
    "tests/idioms/test_idioms.py": "what people write in training scripts, which is everything at once",
    "tests/jobs/planning/test_plan_files.py": "the plans that ship as files",
    "tests/jobs/planning/test_planned_training.py": "training by plans from the planner, the two together",
    "tests/jobs/verification/test_planted_faults.py": "whether what is planted is found, by all sources of cases",
    "tests/layers/models/test_captured_networks.py": "all networks: their training with captured steps",
    "tests/layers/models/test_models.py": "all reference models: their structure",
    "tests/layers/models/test_reference_models.py": "all reference models: their training over ranks",
    "tests/layers/models/test_third_party.py": "networks of other packages",
    "tests/pipeline/runtime/test_asynchronous.py": "schedules that update after every mini-batch, run",
    "tests/pipeline/runtime/test_faults.py": "bad input, and ranks that fail in the middle of a run",
    "tests/pipeline/runtime/test_gpu.py": "stages on a GPU",
    "tests/pipeline/runtime/test_sparse_stages.py": "stages of sparse networks",
    "tests/pipeline/runtime/test_grids.py": "stages that are grids of ranks",
    "tests/pipeline/runtime/test_models.py": "real models and odd stages",
    "tests/pipeline/runtime/test_recorded_models.py": "models that only a run with an example can cut",
    "tests/pipeline/runtime/test_plans.py": "stages whose layers have different grids",
    "tests/pipeline/runtime/test_third_party_models.py": "networks of another package as stages",
    "tests/pipeline/runtime/test_synchronous.py": "schedules that update after all micro-batches, run",
    "tests/pipeline/simulation/test_bapipe_closed_forms.py": "the simulator against BaPipe's printed formulas",
    "tests/test_harness.py": "the harness itself",
    "tests/test_mutation.py": "the tool that draws mutations of modules",
}
"""Test files that mirror no module, and why; those of the structure mirror the whole tree."""


def exempt(module: str) -> bool:
    return any(module.startswith(place) for place in TESTED_ELSEWHERE)


def mirror(path: Path) -> Path:
    return ROOT / "tests" / path.parent / f"test_{path.name}"


MODULES = {path.relative_to(ROOT) for path in SOURCES.values() if path.name != "__init__.py"}
TEST_FILES = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}


def test_a_module_has_a_test_file_of_its_name() -> None:
    long = [path for path in MODULES if len((ROOT / path).read_text().splitlines()) > SHORT]
    without = {str(path) for path in long if not mirror(path).exists()}
    assert not sorted(path for path in without if not exempt(path))


def test_a_test_file_has_the_name_of_a_module() -> None:
    named = {mirror(path).relative_to(ROOT) for path in MODULES}
    others = {str(path) for path in TEST_FILES - named if path.parts[1] != "structure"}
    assert sorted(others) == sorted(OF_NO_MODULE)


def test_every_exception_is_still_one() -> None:
    for place in TESTED_ELSEWHERE:
        found = [path for path in MODULES if str(path).startswith(place)]
        assert [path for path in found if not mirror(path).exists()], f"{place} needs no exception any more"
