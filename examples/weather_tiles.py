"""Learn to forecast made-up weather from tiles of a NetCDF file: each node stages its part alone.

pip install '.[hdf5]'
python examples/weather_tiles.py runs/weather
mpiexec -n 2 python examples/weather_tiles.py runs/weather
"""

import sys
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import dataio
import shuffle

SIZES = {"time": 400, "lat": 96, "lon": 128}
TILES: dict[str | int, int] = {"time": 2, "lat": 32, "lon": 32}


def write_weather(path: Path) -> None:
    time, lat, lon = (np.arange(size, dtype=np.float32) for size in SIZES.values())
    phases = np.random.default_rng(0).random(3)
    east = (lon - 2 * time[:, None]) * np.pi / 64
    waves = sum(np.sin(east * k + phase) for k, phase in zip((1, 2, 5), phases, strict=True))
    with h5py.File(path, "w") as file:
        values = (waves[:, None, :] * np.cos(lat / 96 - 0.5)[:, None]).astype(np.float32)
        made = file.create_dataset("wind", data=values, chunks=(20, 32, 32), compression="gzip")
        for dim, (name, size) in zip(made.dims, SIZES.items(), strict=True):
            file.create_dataset(name, data=np.arange(size)).make_scale(name)
            dim.attach_scale(file[name])


def main(directory: Path) -> None:
    with dataio.join() as job:
        if dist.get_rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
            write_weather(directory / "weather.nc")
        dist.barrier()
        source = dataio.ArrayFiles(directory / "weather.nc", axis=None, tiles=TILES)
        fields = {"wind": dataio.Array("wind", (2, 32, 32), "float32")}
        with dataio.Loader(
            source, batch_size=32, fields=fields, cache=directory / "cache", seed=0,
            shuffle=shuffle.Partial(exchange=0.1), device=job.device,
        ) as loader:  # fmt: skip
            train(loader, job.device)


def train(loader: dataio.Loader, device: torch.device) -> None:
    torch.manual_seed(0)
    network = nn.Conv2d(1, 1, 9, padding=4)
    model = nn.parallel.DistributedDataParallel(network.to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in loader.epochs(3):
        for batch in loader:
            now, then = batch["wind"][:, :1], batch["wind"][:, 1:]
            loss = (model(now) - then).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: squared error {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
