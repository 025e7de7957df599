"""Label the points of scanned rooms (floor, walls, furniture) with a sparse network; space is split over ranks.

mpiexec -n 2 distconv run examples/point_cloud.py --grid d=2
"""

import argparse

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

import distconv as dc
from distconv.layers import sparse

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--grid", type=dc.parse_grid, default={"d": MPI.COMM_WORLD.size})
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--points", type=int, default=6000, help="of a room")
parser.add_argument("--voxels", type=int, default=48, help="along the edge of a room")
options = parser.parse_args()


def rooms(count, seed):
    """Return the sorted voxels (N, 1 + 3) that contain points, the number of points in each, and their main label."""
    random = torch.Generator().manual_seed(seed)
    coordinates, labels = [], []
    for room in range(count):
        points = torch.rand(options.points, 3, generator=random)
        kind = torch.randint(3, (options.points,), generator=random)
        points[kind == 0, 2] = 0  # the floor
        wall = kind == 1
        side = torch.randint(2, (int(wall.sum()),), generator=random)
        points[wall, side] = torch.randint(2, side.shape, generator=random).to(points.dtype)
        boxes = torch.rand(4, 3, generator=random) * 0.6 + 0.1
        of_box = torch.randint(4, (int((kind == 2).sum()),), generator=random)
        points[kind == 2] = boxes[of_box] * torch.tensor([1, 1, 0]) + 0.25 * points[kind == 2]
        points += 0.01 * torch.randn(points.shape, generator=random)
        voxels = (points.clamp(0, 0.999) * options.voxels).long()
        coordinates.append(F.pad(voxels, (1, 0), value=room))
        labels.append(kind)
    found, back = torch.unique(torch.cat(coordinates), dim=0, return_inverse=True)
    votes = torch.zeros(len(found), 3).index_put_((back, torch.cat(labels)), torch.ones(len(back)), accumulate=True)
    return found, torch.log1p(votes.sum(1, keepdim=True)), votes.argmax(1)


device = dc.device()
grid = dc.ProcessGrid(MPI.COMM_WORLD, **options.grid)
torch.manual_seed(0)
layers = []
for inputs, outputs in ((1, 16), (16, 32), (32, 32)):
    layers += [sparse.SparseConv(inputs, outputs, 5), nn.BatchNorm1d(outputs), nn.ReLU()]
model = dc.parallelize(nn.Sequential(*layers, nn.Linear(32, 3)).to(device), grid)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

losses = []
for step in range(options.steps):
    coordinates, features, labels = rooms(2, seed=step)
    x = sparse.scatter(sparse.SparseTensor(coordinates.to(device), features.to(device)), grid)
    loss = F.cross_entropy(sparse.gather(model(x)).features, labels.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

model.eval()
coordinates, features, labels = rooms(2, seed=-1)
with torch.no_grad():
    x = sparse.scatter(sparse.SparseTensor(coordinates.to(device), features.to(device)), grid)
    found = sparse.gather(model(x)).features.argmax(1).cpu()
right, frequent = (found == labels).double().mean(), labels.bincount().max() / len(labels)
if grid.rank == 0:
    print(
        f"{len(labels)} voxels of rooms that it has not seen; loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last"
    )
    print(f"labels that are right: {right:.3f} (the most frequent label everywhere: {frequent:.3f})")
