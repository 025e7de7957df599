"""Find ellipsoids in noisy volumes with MONAI's 3-D U-Net, split over ranks, and in a larger one by sliding windows.

mpiexec -n 2 distconv run examples/segment_3d.py --grid d=2
"""

import argparse

import torch
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from mpi4py import MPI

import distconv as dc

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--grid", type=dc.parse_grid, default={"d": MPI.COMM_WORLD.size})
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--size", type=int, default=48, help="edge of the volumes that it trains on")
options = parser.parse_args()


def volumes(count, size, seed):
    """Return noisy volumes (count, 1, size, size, size) with four ellipsoids each, and the masks of the ellipsoids."""
    random = torch.Generator().manual_seed(seed)
    axes = torch.stack(torch.meshgrid(*[torch.linspace(0, 1, size)] * 3, indexing="ij"))
    centres = 0.2 + 0.6 * torch.rand(count, 4, 3, 1, 1, 1, generator=random)
    radii = 0.08 + 0.12 * torch.rand(count, 4, 3, 1, 1, 1, generator=random)
    inside = (((axes - centres) / radii).square().sum(2) < 1).any(1, keepdim=True)
    return inside + torch.randn(inside.shape, generator=random), inside.long()


device = dc.device()
grid = dc.ProcessGrid(MPI.COMM_WORLD, **options.grid)
torch.manual_seed(0)
model = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), norm="batch")
model = dc.parallelize(model.to(device), grid)
criterion = DiceCELoss(to_onehot_y=True, softmax=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=options.steps)

losses = []
for step in range(options.steps):
    images, labels = volumes(2, options.size, seed=step)
    loss = criterion(model(dc.scatter(images.to(device), grid)), dc.scatter(labels.to(device), grid))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())

model.eval()
image, label = volumes(1, 2 * options.size, seed=-1)


def predict(windows):
    """Return the full logits of full windows; all ranks compute each window together."""
    return dc.gather(model(dc.scatter(windows, grid)))


with torch.no_grad():
    logits = sliding_window_inference(image.to(device), (options.size,) * 3, 2, predict, overlap=0.25)
found = logits.argmax(1, keepdim=True).cpu().bool()
dice = 2 * (found & label.bool()).sum() / (found.sum() + label.sum())
threshold = 2 * ((image > 1) & label.bool()).sum() / ((image > 1).sum() + label.sum())
if grid.rank == 0:
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    print(f"Dice over windows of a volume that it has not seen: {dice:.3f} (voxels above a threshold: {threshold:.3f})")
