"""Classify noisy gratings of eight directions, trained with DistributedDataParallel.

torchrun --nproc-per-node 2 examples/classify_ddp.py
"""

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--samples", type=int, default=512)
parser.add_argument("--size", type=int, default=48)
parser.add_argument("--batch", type=int, default=32)
options = parser.parse_args()

dist.init_process_group("gloo")

torch.manual_seed(0)
labels = torch.arange(options.samples) % 8
y, x = torch.meshgrid(torch.arange(options.size), torch.arange(options.size), indexing="ij")
angles = (labels * math.pi / 8).view(-1, 1, 1)
waves = torch.sin((x * angles.cos() + y * angles.sin()) / 2 + 6.3 * torch.rand(options.samples, 1, 1))
data = TensorDataset((waves + torch.randn(waves.shape)).unsqueeze(1), labels)
sampler = DistributedSampler(data)
loader = DataLoader(data, options.batch // dist.get_world_size(), sampler=sampler)

layers = [nn.Conv2d(1, 16, 5, padding=2), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)]
layers += [nn.Conv2d(16, 32, 5, padding=2), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2)]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

losses = []
for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for images, targets in loader:
        loss = F.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1} loss {losses[-1]:.6f}", flush=True)
dist.destroy_process_group()
