"""Classify noisy gratings of eight directions with Lightning's Trainer and a network that distconv splits.

mpiexec -n 2 distconv run examples/classify_lightning.py --grid h=2
"""

import argparse
import math

import lightning.pytorch as lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only
from mpi4py import MPI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distconv as dc

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--samples", type=int, default=512)
parser.add_argument("--size", type=int, default=48)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--grid", type=dc.parse_grid, default={"n": MPI.COMM_WORLD.size})
options = parser.parse_args()

grid = dc.ProcessGrid(MPI.COMM_WORLD, **options.grid)


class OverGrid(SingleDeviceStrategy):
    """Run one process per rank without communication by Lightning; rank 0 logs and saves."""

    def __init__(self) -> None:
        super().__init__(device=dc.device())
        self.global_rank = rank_zero_only.rank = grid.rank

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0, which logs and saves. Otherwise False."""
        return self.global_rank == 0

    def barrier(self, *_, **__):
        """Wait for all ranks, so that all of them see a checkpoint."""
        MPI.COMM_WORLD.Barrier()

    def broadcast(self, obj, src=0):
        """Return the value of rank ``src``, such as the folder of this run."""
        return MPI.COMM_WORLD.bcast(obj, root=src)


class Classifier(lightning.LightningModule):
    """An ordinary LightningModule, except that the model is parallelized and batches are scattered."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 16, 5, padding=2), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(16, 32, 5, padding=2), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2)]
        self.model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8))
        self.losses = []

    def configure_model(self) -> None:
        """Parallelize the model after the Trainer has moved it to its device."""
        self.model = dc.parallelize(self.model, grid)

    def configure_optimizers(self):
        """Return any optimizer of torch."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def training_step(self, batch, _):
        """Return the loss of the full batch."""
        images, targets = batch
        loss = F.cross_entropy(self.model(dc.scatter(images, grid)), dc.scatter(targets, grid))
        self.losses.append(loss.item())
        self.log("loss", self.losses[-1], on_epoch=True, batch_size=len(images))
        return loss


lightning.seed_everything(0)  # the same initial weights and sample order on all ranks
labels = torch.arange(options.samples) % 8
y, x = torch.meshgrid(torch.arange(options.size), torch.arange(options.size), indexing="ij")
angles = (labels * math.pi / 8).view(-1, 1, 1)
waves = torch.sin((x * angles.cos() + y * angles.sin()) / 2 + 6.3 * torch.rand(options.samples, 1, 1))
data = TensorDataset((waves + torch.randn(waves.shape)).unsqueeze(1), labels)

model = Classifier()
trainer = lightning.Trainer(
    strategy=OverGrid(),
    devices=1,
    max_epochs=options.epochs,
    logger=CSVLogger("runs/lightning", name=""),
    callbacks=[ModelCheckpoint(monitor="loss_epoch")],
    log_every_n_steps=1,
    enable_progress_bar=False,
)
trainer.fit(model, DataLoader(data, options.batch, shuffle=True))
losses = model.losses
if grid.rank == 0:
    print(f"loss {losses[-1]:.6f}; {trainer.checkpoint_callback.best_model_path}")
