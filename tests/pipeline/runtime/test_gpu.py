"""Pipelines whose stages are on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from distconv.pipeline import Pipeline, SerialPipeline
from tests.pipeline.training import SGD, batches, convolutions, copies, states


@pytest.mark.gpu
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("name", "options"),
    [("1f1b-sno", {"microbatches": 3}), ("zero-bubble", {"microbatches": 3})]
    + [("stale", {"weights": weights}) for weights in ("newest", "stash", "predict", "recompute")],
)
def test_stages_on_a_gpu_train_as_one_process_does(comm, name, options):
    device = torch.device("cuda", comm.rank % torch.cuda.device_count())
    in_place = options.get("weights") != "recompute"
    alone = [stage.to(device) for stage in convolutions(comm.size, inplace=in_place)]
    over_ranks = copies(alone)
    pipe = Pipeline(over_ranks, comm, name, F.cross_entropy, optimizer=SGD, **options)
    serial = SerialPipeline(alone, F.cross_entropy, SGD, name, **options)
    for x, target in batches(5):
        pipe.step(x.to(device), target.to(device))
        serial.step(x.to(device), target.to(device))
    pipe.drain()
    serial.drain()
    pipe.synchronize()
    expected = states(alone)
    for key, value in states(over_ranks).items():
        assert torch.allclose(value, expected[key], rtol=1e-9, atol=1e-12), key
    pipe.close()
