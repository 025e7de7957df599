"""A training loop that a batch system may stop; the same command resumes it.

    mpiexec -n 4 distconv run examples/stop_and_go.py --grid n=2,h=2 --out runs/own
    sbatch jobs/train_own.sbatch examples/stop_and_go.py --grid n=2,h=2 --out runs/own

SIGUSR1, or SIGTERM, to any rank ends it after a step with a checkpoint and exit code 143.
"""

import argparse
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

import distconv as dc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--grid", type=dc.parse_grid, default={"h": MPI.COMM_WORLD.size})
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--size", type=int, default=64)
parser.add_argument("--out", type=Path, default=Path("runs/own"))
options = parser.parse_args()

stop = False


def ask_to_stop(number, frame):
    """Set a flag: a step that has begun is finished."""
    global stop
    stop = True


for each in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(each, ask_to_stop)

comm, device = MPI.COMM_WORLD, dc.device()
grid = dc.ProcessGrid(comm, **options.grid)
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GELU(), nn.BatchNorm2d(16), nn.Conv2d(16, 1, 3, padding=1))
model = dc.parallelize(model.to(device), grid)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=options.steps)

saved = dc.load_checkpoint(options.out, model, optimizer, missing_ok=True)
begin = saved.step if saved else 0
if saved:
    scheduler.load_state_dict(saved.values["scheduler"])

losses = []
for step in range(begin + 1, options.steps + 1):
    # The step number determines the samples of a step, so that they are the same after a stop.
    images = torch.randn(4, 3, options.size, options.size, generator=torch.Generator().manual_seed(step)).to(device)
    x = dc.scatter(images, grid)
    target = dc.scatter(F.avg_pool2d(images.prod(1, keepdim=True), 3, 1, 1), grid)
    loss = F.mse_loss(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())  # on all ranks
    if comm.rank == 0:
        print(f"step {step} loss {losses[-1]:.12f}", flush=True)
    asked = comm.allreduce(stop, MPI.LOR)  # all ranks end with the same step
    if asked or step % 20 == 0 or step == options.steps:
        dc.save_checkpoint(options.out, step, model, optimizer, {"scheduler": scheduler.state_dict()})
    if asked:
        if comm.rank == 0:
            print(f"stopped after step {step}", flush=True)
        sys.exit(143)
