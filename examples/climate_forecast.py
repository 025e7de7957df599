"""Forecast two variables of a store that xarray wrote, with errors weighted by area and a rollout of three steps.

    mpiexec -n 2 distconv run examples/climate_forecast.py --grid h=2

The store is packed as those of reanalyses are: 16-bit integers, missing values over land, and a variable on three
levels. Each rank reads and writes its own rows.
"""

import argparse
import shutil

import numpy as np
import torch
import torch.nn.functional as F
import xarray
from mpi4py import MPI
from torch import nn

import distconv as dc
from distconv.data import Field, Loader, latitude_weights, moments, open_gridded

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--grid", type=dc.parse_grid, default={"h": MPI.COMM_WORLD.size})
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--times", type=int, default=160)
parser.add_argument("--longitudes", type=int, default=48)
options = parser.parse_args()


def make_store(path):
    """Write waves that move with the winds: sea temperature without land, and heights on three levels."""
    lat, lon = (np.linspace(-80, 80, options.longitudes // 2), np.arange(options.longitudes) * 360 / options.longitudes)
    hours = 6 * np.arange(options.times)
    x, y, t = np.deg2rad(lon), np.deg2rad(lat)[:, None], hours[:, None, None] / 24

    def wave(number, speed):
        return np.cos(number * (x - speed * t) + y) * np.cos(y)

    land = np.cos(3 * x) * np.cos(2 * y) > 0.6
    sst = np.where(land, np.nan, 288 + 8 * wave(2, 0.4) + 3 * wave(3, 0.2))
    z = np.stack([5000 * (level + 1) + 200 * wave(2 + level, 0.4 - 0.1 * level) for level in range(3)], 1)
    data = xarray.Dataset(
        {
            "sst": (("time", "lat", "lon"), sst, {"units": "K"}),
            "z": (("time", "level", "lat", "lon"), z, {"units": "m"}),
            "land": (("lat", "lon"), land.astype("float32")),
        },
        coords={
            "time": ("time", hours, {"units": "hours since 2001-01-01"}),
            "level": [850.0, 500.0, 250.0],
            "lat": ("lat", lat, {"units": "degrees_north"}),
            "lon": ("lon", lon, {"units": "degrees_east"}),
        },
    )
    packed = {"dtype": "int16", "_FillValue": -32768}
    encoding = {
        "sst": {**packed, "scale_factor": 0.001, "add_offset": 288.0},
        "z": {**packed, "scale_factor": 0.5, "add_offset": 10000.0},
    }
    shutil.rmtree(path, ignore_errors=True)
    data.to_zarr(path, encoding=encoding, consolidated=False)


class Forecast(nn.Module):
    """A network that maps the state and the land mask to the state one step later."""

    def __init__(self, channels):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(channels + 1, 32, 5), nn.Conv2d(32, 32, 5), nn.Conv2d(32, channels, 5)])

    def forward(self, state, land):
        """Return ``state`` plus the learned change; longitudes are circular."""
        x = torch.cat([state, land], 1)
        for number, layer in enumerate(self.layers):
            x = F.gelu(x) if number else x
            x = layer(F.pad(F.pad(x, (2, 2, 0, 0), mode="circular"), (0, 0, 2, 2), mode="replicate"))
        return state + x


grid = dc.ProcessGrid(MPI.COMM_WORLD, **options.grid)
if grid.rank == 0:
    make_store("climate.zarr")
grid.world.Barrier()

steps = 3
dtype = torch.get_default_dtype()
variables = ["sst", "z"]
datasets = {"state": variables, "land": ["land"], "later": variables}
source = open_gridded("climate.zarr", datasets, grid.world, lag={"later": range(1, steps + 1)})
scaling = moments(source, "state", missing=True)  # of each variable and level, without land
mean, std = scaling.mean, scaling.std
fields = [
    Field("state", "nchw", dtype, shift=mean, scale=std, fill=0.0),
    Field("land", "nchw", dtype),
    Field("later", "nchw", dtype, shift=np.tile(mean, steps), scale=np.tile(std, steps), fill=0.0),
]
loader = Loader(source, fields, grid, batch=8, seed=0)
channels = len(mean)

torch.manual_seed(0)
model = dc.parallelize(Forecast(channels), grid)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
weights = latitude_weights(source.coords["lat"].values).to(dtype).expand(-1, options.longitudes)
weights = dc.scatter(weights.contiguous().view(1, 1, -1, options.longitudes), grid)

losses = []
for epoch in range(options.epochs):
    for batch in loader.epoch(epoch):
        state, land, later = batch.tensors
        loss = 0.0
        for step in range(steps):
            state = model(state, land)
            expected = later[:, step * channels : (step + 1) * channels]
            loss = loss + (weights * (state - expected) ** 2).mean() / steps
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

last = Loader(source, fields, grid, batch=source.shape("state")[0], shuffle=False)
state, land, later = next(last.epoch(0)).tensors
with torch.no_grad():
    forecast = model(state, land)
scale, shift = (torch.as_tensor(each, dtype=dtype).view(1, -1, 1, 1) for each in (std, mean))
forecast = forecast * scale + shift
if grid.rank == 0:
    shutil.rmtree("forecast.zarr", ignore_errors=True)
grid.world.Barrier()
coords = {"time": source.sample_times(1), **{name: source.coords[name] for name in ("level", "lat", "lon")}}
dims = {"sst": ("time", "lat", "lon"), "z": ("time", "level", "lat", "lon")}
dc.write({"sst": forecast[:, 0], "z": forecast[:, 1:]}, "forecast.zarr", dims=dims,
         coords=coords, attrs={name: source.variable_attributes(name) for name in variables})  # fmt: skip
source.close()
if grid.rank == 0:
    written = xarray.open_zarr("forecast.zarr")
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    print(f"forecast.zarr: {dict(written.sizes)}")
