"""How fast are random patches of volumes, beside the samplers of MONAI and TorchIO?

Volumes of float32 lie in ``.npy`` files, of which each epoch draws some patches. Ours are cut by
`dataio.RandomPatch` out of a staged cache. MONAI's come from ``RandSpatialCropSamplesd`` over a
``Dataset``, which loads a volume for each sample, and over a ``CacheDataset``, which holds all in
memory. TorchIO's come from a ``Queue`` with a ``UniformSampler``. None has processes of its own;
ours has as many threads as torch. A library that is not installed is left out.

The ways take turns in one process, an epoch each, in an order that goes round. Ratios are those of
patches per second within a turn, of the others over ours: below 1, ours is faster. What is given is
their median, and the quarters about it; ``cpu`` is the processor time of all threads, of the others
over ours. All files are in the page cache. The first turn warms up.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.patches [--side 256] [--volumes 8] [--repeats 9]
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dataio
from benchmarks.studies.live_cost import quarters
from tonari.report.machine import describe_machine

Epoch = Callable[[], Iterable[Any]]
"""Gives an epoch's batches, each with its patches."""


@contextlib.contextmanager
def ours(directory: Path, side: int, patch: int, num: int) -> Iterator[Epoch]:
    """Open our way."""
    cut = dataio.RandomPatch((patch,) * 3, num=num)
    with dataio.Loader(
        dataio.ArrayFiles(str(directory / "*.npy"), axis=None), batch_size=1,
        fields={"image": dataio.Array("arr_0", (side,) * 3, "float32", patch=cut)},
        cache=directory / "cache", reports=dataio.Reports(progress=False),
        workers=dataio.Workers(threads=torch.get_num_threads()),
    ) as loader:  # fmt: skip
        yield lambda: (batch["image"] for batch in loader)


def monai(directory: Path, patch: int, num: int, *, kind: str) -> Epoch:
    """Open MONAI's way."""
    data, transforms = import_module("monai.data"), import_module("monai.transforms")
    steps = [
        transforms.LoadImaged(["image"], reader="NumpyReader", ensure_channel_first=True),
        transforms.RandSpatialCropSamplesd(["image"], (patch,) * 3, num, random_size=False),
    ]
    files = [{"image": str(path)} for path in sorted(directory.glob("*.npy"))]
    options = {"progress": False} if kind == "CacheDataset" else {}
    loader = data.DataLoader(
        getattr(data, kind)(files, transforms.Compose(steps), **options), shuffle=True
    )
    # As plain tensors: what is asked of its own kind of tensor costs much
    return lambda: (batch["image"].as_subclass(torch.Tensor) for batch in loader)


def torchio(directory: Path, patch: int, num: int) -> Epoch:
    """Open TorchIO's way."""
    tio = import_module("torchio")

    def read(path: Path) -> tuple[torch.Tensor, Any]:
        return torch.from_numpy(np.load(path))[None], np.eye(4)

    files = sorted(directory.glob("*.npy"))
    subjects = [tio.Subject(image=tio.ScalarImage(path, reader=read)) for path in files]
    sampler = tio.UniformSampler(patch)
    queue = tio.Queue(tio.SubjectsDataset(subjects), num * len(files), num, sampler)
    loader = tio.SubjectsLoader(queue, batch_size=num)
    return lambda: (batch["image"]["data"] for batch in loader)


def take_turn(epoch: Epoch, patch: int) -> dict[str, float]:
    """Draw an epoch's patches: how many a second, and the processor time of one."""
    began, cpu_s, num = time.perf_counter(), time.process_time(), 0
    for batch in epoch():
        num += batch.numel() // patch**3
        float(batch.flatten()[-1])
    took_s = time.perf_counter() - began
    return {"num": num, "patches_per_s": num / took_s, "cpu": (time.process_time() - cpu_s) / num}


def measure(directory: Path, args: argparse.Namespace) -> dict[str, object]:
    """Let all ways take turns."""
    rng, patch, num = np.random.default_rng(0), args.patch, args.num
    for number in range(args.volumes):
        np.save(directory / f"{number}.npy", rng.random((args.side,) * 3, np.float32))
    made: dict[str, Callable[[], Epoch]] = {
        "monai Dataset": lambda: monai(directory, patch, num, kind="Dataset"),
        "monai CacheDataset": lambda: monai(directory, patch, num, kind="CacheDataset"),
        "torchio Queue": lambda: torchio(directory, patch, num),
    }
    with ours(directory, args.side, patch, num) as epoch:
        ways: dict[str, Epoch] = {"ours": epoch}
        for name, make in made.items():
            with contextlib.suppress(ModuleNotFoundError):
                ways[name] = make()
        turns, names = [], list(ways)
        for turn in range(args.repeats + 1):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            turns.append({name: take_turn(ways[name], patch) for name in order})
    figures: dict[str, object] = vars(args) | {"question": "random patches of volumes"}
    for name in names:
        if {turn[name]["num"] for turn in turns} != {args.volumes * num}:
            raise SystemExit(f"{name} drew another number of patches than {args.volumes * num}")
        rates = [turn[name]["patches_per_s"] for turn in turns[1:]]
        figures[f"{name}, patches_per_s"] = round(statistics.median(rates), 1)
        for what in ("patches_per_s", "cpu"):
            ratios = [turn[name][what] / turn["ours"][what] for turn in turns[1:]]
            figures[f"{name} of ours, {what}"] = quarters(ratios)
    return figures


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("side", 256), ("patch", 64), ("volumes", 8), ("num", 4), ("repeats", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(Path(scratch), parser.parse_args())
        print(json.dumps(figures | describe_machine(Path(scratch))))


if __name__ == "__main__":
    main()
