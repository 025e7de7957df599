"""Label the points of furniture by their part (plate, rod, ball) with a sparse U-Net; space is split over ranks.

mpiexec -n 2 distconv run examples/point_cloud_segmentation.py --grid d=2
"""

import argparse
import math

import torch
import torch.nn.functional as F
from mpi4py import MPI

import distconv as dc
from distconv.layers import sparse
from distconv.layers.models.sparse import sparse_unet

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--grid", type=dc.parse_grid, default={"d": MPI.COMM_WORLD.size})
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--shapes", type=int, default=6, help="shapes in a mini-batch")
parser.add_argument("--points", type=int, default=1500, help="points of a shape")
parser.add_argument("--voxels", type=int, default=32, help="voxels along the edge of space")
options = parser.parse_args()
PARTS = ("plate", "rod", "ball")


def shape(kind, random):
    """Return the points (P, 3) of a table, a lamp or a dumbbell in the unit cube, and their parts (P)."""
    place = 2 * torch.rand(options.points, 3, generator=random) - 1
    part = torch.randint(len(PARTS), (options.points,), generator=random)
    legs = 0.8 * torch.randint(2, (options.points, 2), generator=random) * 2 - 0.8
    ends = torch.randint(2, (options.points, 1), generator=random) * 2.0 - 1
    ball = 0.35 * F.normalize(place, dim=1)
    if kind == 0:  # a table: a plate on four rods, and a ball on it
        plate, rod = (
            place * torch.tensor([1, 1, 0.05]),
            torch.cat([legs + 0.06 * place[:, :2], place[:, 2:] / 2 - 0.5], 1),
        )
        ball = ball + torch.tensor([0, 0, 0.4])
    elif kind == 1:  # a lamp: a plate below, a rod, and a ball above
        plate, rod = (
            place * torch.tensor([0.5, 0.5, 0.05]) - torch.tensor([0, 0, 1]),
            place * torch.tensor([0.06, 0.06, 1]),
        )
        ball = ball + torch.tensor([0, 0, 1])
    else:  # a dumbbell: two balls at the ends of a rod, and plates between
        plate, rod = place * torch.tensor([0.5, 0.05, 0.5]), place * torch.tensor([0.06, 1, 0.06])
        plate, ball = plate + 0.4 * ends * torch.tensor([0, 1, 0]), ball + ends * torch.tensor([0, 1, 0])
    points = torch.stack([plate, rod, ball])[part, torch.arange(options.points)]
    angle = 2 * math.pi * torch.rand((), generator=random)
    turn = torch.tensor([[angle.cos(), -angle.sin(), 0], [angle.sin(), angle.cos(), 0], [0, 0, 1]])
    points = points @ turn + 0.01 * torch.randn(points.shape, generator=random)
    return (points / 3 + 0.5).clamp(0, 0.999), part


def batch(seed):
    """Return points (N, 1 + 3) in voxels with their parts (N), and a sparse tensor with the main part of each voxel."""
    random = torch.Generator().manual_seed(seed)
    clouds = [shape(kind % 3, random) for kind in range(options.shapes)]
    points = torch.cat([F.pad(points * options.voxels, (1, 0), value=n) for n, (points, _) in enumerate(clouds)])
    parts = torch.cat([part for _, part in clouds])
    coordinates, voxel = torch.unique(points.long(), dim=0, return_inverse=True)
    votes = torch.zeros(len(coordinates), len(PARTS)).index_put_((voxel, parts), points.new_ones(()), accumulate=True)
    x = sparse.SparseTensor(coordinates, torch.log1p(votes.sum(1, keepdim=True)), batch_size=options.shapes)
    return points, parts, x, x.replace(votes.argmax(1, keepdim=True))


device = dc.device()
grid = dc.ProcessGrid(MPI.COMM_WORLD, **options.grid)
torch.manual_seed(0)
model = dc.parallelize(sparse_unet(width=8, classes=len(PARTS), depth=2).to(device), grid)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

losses = []
for step in range(options.steps):
    _, _, x, labels = batch(seed=step)
    # The labels are scattered as the features are, so each rank has those of its own voxels.
    x, labels = (sparse.scatter(each.to(device), grid) for each in (x, labels))
    loss = F.cross_entropy(model(x).features, labels.features[:, 0])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

model.eval()
points, parts, x, _ = batch(seed=-1)
with torch.no_grad():
    logits = model(sparse.scatter(x.to(device), grid))
    # The centre of voxel v is at v + 1/2, and its site at v.
    centred = (points - torch.tensor([0, 0.5, 0.5, 0.5])).to(device)
    found = dc.gather(sparse.interpolate(logits, centred)).argmax(1).cpu()
if grid.rank == 0:
    print(
        f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last; {len(parts)} points of shapes that it has not seen"
    )
    for n, name in enumerate(PARTS):
        right, either = ((found == n) & (parts == n)).sum(), ((found == n) | (parts == n)).sum()
        print(f"{name}: intersection over union {right / either:.3f}")
