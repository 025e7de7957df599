"""Former names of public classes warn and give the class of today."""

from __future__ import annotations

import importlib

import pytest

FORMER = {
    "distconv.checkpoint.Saving": "AsyncSave",
    "distconv.communication.routes.Layout": "IndexLayout",
    "distconv.data.Address": "Url",
    "distconv.data.Layout": "DatasetLayout",
    "distconv.data.Portable": "PicklableSource",
    "distconv.data.reading_processes.Portable": "PicklableSource",
    "distconv.data.source.Source": "SampleSource",
    "distconv.kernels.scan.Prediction": "ScanPrediction",
    "distconv.process.stop_requests.StopRequests": "PreemptionHandler",
    "distconv.tracing.trace.Traced": "TraceResult",
}


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_warns_and_is_the_class_of_today(name: str) -> None:
    module, _, former = name.rpartition(".")
    owner = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{module}.{former} is now {module}.{FORMER[name]}"):
        found = getattr(owner, former)
    assert found is getattr(owner, FORMER[name])


def test_other_names_are_missing_as_usual() -> None:
    with pytest.raises(AttributeError, match=r"module 'distconv\.data' has no attribute 'Nothing'"):
        importlib.import_module("distconv.data").Nothing  # noqa: B018
