"""The jobs that the rows share: settings by model, steps of one without a loader, made pictures."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu.row import Setting
from dataio.job.launch import Job
from dataio.rows.samples import Batch
from tonari.bench.loader.sets import IMAGE_SIDE, NUM_CLASSES, SampleSet, make_set, open_set
from tonari.oracle.trace import NoReports, make_batch
from tonari.trainer.config.config import Config, build_config, change
from tonari.trainer.config.settings import parse_override
from tonari.trainer.run.build import build_parallel
from tonari.trainer.run.optimizers import build_optimizer
from tonari.trainer.run.own import Own
from tonari.trainer.run.step import train_step

WARM_UP, REPEATS = 2, 5
"""Turns that do not count, and that do."""

PHOTO = (500, 400)
"""Mean width and height; such a photo takes some 115 kB."""
DISTINCT, ROWS = 1024, 8192
"""Photos that are made, and rows of the file that has them over and over."""
SMALL_SIDE = 32

IMAGES = (f"model.num_classes={NUM_CLASSES}", "data.batch_size=256", "augment.flip=0.5")
CROPS = (*IMAGES, "augment.crop=resized", "augment.size=224")
DEEP = ("model.width=768", "model.depth=12", "model.heads=12")
JOBS = {
    "resnet50": ("model.kind=resnet50", *CROPS, "optimizer.lr=0.01"),
    "vit_b": ("model.kind=vit", *DEEP, "model.patch=16", *CROPS, "optimizer.lr=1e-3"),
    "resnet20": (
        "model.kind=resnet", "model.norm=batch", *IMAGES, "augment.crop=random",
        f"augment.size={SMALL_SIDE}", "augment.padding=4", "optimizer.lr=0.01",
    ),
    "gpt": (
        "model.kind=gpt", *DEEP, "model.vocabulary=50304", "data.kind=text",
        "data.sequence_length=1024", "data.batch_size=16", "optimizer.kind=adamw",
        "optimizer.lr=3e-4",
    ),
}  # fmt: skip
"""What is trained; a GPT of this vocabulary has 124 million parameters."""

NARROW = ("model.width=16", "model.depth=2", "model.heads=2")
TINY = {
    "resnet50": ("data.batch_size=4", "augment.size=32", "model.width=8", "model.layers=[1, 1]"),
    "vit_b": ("data.batch_size=4", "augment.size=32", *NARROW),
    "resnet20": ("data.batch_size=4", "model.depth=8"),
    "gpt": (
        "data.batch_size=2", "data.sequence_length=16", "model.vocabulary=256", *NARROW,
    ),
}  # fmt: skip


def make_config(name: str, setting: Setting, *overrides: str, train: str = "none") -> Config:
    """Make the settings of a job, in bfloat16 where the device takes the model so."""
    # On a CPU torch takes no batch statistics in bfloat16.
    half = setting.device == "cuda" or name == "gpt"
    given = (
        f'data.train="{train}"', f"mesh.dtype={'bfloat16' if half else 'float32'}",
        f"run.device={setting.device}", "run.checkpoint_epochs=0", *JOBS[name],
        *(TINY[name] if setting.tiny else ()), *overrides,
    )  # fmt: skip
    tables: dict[str, object] = {}
    change(tables, list(map(parse_override, given)))
    return build_config(tables)


def allocated_bytes() -> int:
    """Count what tensors take of the GPU; 0 where there is none."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


class JobSteps:
    """Optimizer steps of a job in this process, on one batch that lies on its device.

    Attributes:
        peak_bytes: The most that the last steps took of the GPU, the batch left out; 0 on a CPU.
    """

    def __init__(self, config: Config, job: Job) -> None:
        before = allocated_bytes()
        self._config, self._job = config, job
        self._parallel = build_parallel(config, job)
        self._optimizer = build_optimizer(config.optimizer, self._parallel.pipeline.parameters())
        self._own_bytes = allocated_bytes() - before
        made = make_batch(config, Own(), self._parallel.task, self._parallel.pipeline.place)
        self._batch = {name: each.to(job.device) for name, each in filled(made).items()}
        self.peak_bytes = self._done = 0

    def take(self, num_steps: int) -> tuple[float, float]:
        """Take some steps: seconds of each until the device was done, and until it was given all.

        The optimizer's state is made with the first.
        """
        on_gpu = self._job.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        around_bytes = allocated_bytes() - self._own_bytes
        started = time.perf_counter()
        for _ in range(num_steps):
            train_step(
                self._parallel.pipeline, self._optimizer, NoReports(), [self._batch],
                clip=self._config.optimizer.clip, step=self._done,
            )  # fmt: skip
            self._done += 1
        issued_s = time.perf_counter() - started
        if on_gpu:
            torch.cuda.synchronize()
            self.peak_bytes = torch.cuda.max_memory_allocated() - around_bytes
            self._own_bytes = allocated_bytes() - around_bytes
        return (time.perf_counter() - started) / num_steps, issued_s / num_steps


def filled(batch: Batch) -> dict[str, Tensor]:
    """Give a batch contents that depend on its shapes alone, its labels those of pictures."""
    generator = torch.Generator().manual_seed(0)
    for name, value in batch.items():
        if name not in ("weight", "sample_id", "slot"):
            value.random_(0, NUM_CLASSES if name == "label" else 256, generator=generator)
    return batch


def take_turns(ways: Mapping[str, Callable[[], None]], *, repeats: int = REPEATS) -> None:
    """Give each way a turn in every repeat, in an order that rotates; the first ones warm up."""
    names = list(ways)
    for repeat in range(WARM_UP + repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            ways[name]()


def compare_steps(
    configs: Mapping[str, Config], job: Job, *, tiny: bool, to: str
) -> dict[str, dict[str, float]]:
    """Let jobs train by turns; their figures, and ratios to one of them, median of the turns."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in configs}
    jobs = {name: JobSteps(config, job) for name, config in configs.items()}
    num_steps = 1 if tiny else 10

    def turn(name: str) -> Callable[[], None]:
        return lambda: found[name].append(jobs[name].take(num_steps))

    take_turns({name: turn(name) for name in configs}, repeats=1 if tiny else REPEATS)
    ways = {}
    for name, laps in found.items():
        counted = list(zip(laps, found[to], strict=True))[WARM_UP:]
        ways[name] = {
            "step_ms": 1e3 * statistics.median(step for (step, _), _ in counted),
            "issue_ms": 1e3 * statistics.median(issue for (_, issue), _ in counted),
            "step_ratio": statistics.median(own / other for (own, _), (other, _) in counted),
            "issue_ratio": statistics.median(own / other for (_, own), (_, other) in counted),
        }
        if jobs[name].peak_bytes:
            ways[name]["peak_bytes"] = jobs[name].peak_bytes
    return ways


# Data


def photos(setting: Setting) -> Path:
    """Make photos of many sizes from a seed, unless they are there: a Parquet file of JPEG."""
    num_distinct, size = (64, (64, 48)) if setting.tiny else (DISTINCT, PHOTO)
    spec = SampleSet(name="photos", num_samples=num_distinct, sample_bytes=0, photo=size)
    path = setting.work / f"photos-{num_distinct}.parquet"
    if not path.exists():
        make_set(spec, setting.work / "photos")
        made = open_set(setting.work / "photos")
        _write(path, [made.sample(number).tobytes() for number in range(num_distinct)],
               made.labels, num_rows=num_distinct if setting.tiny else ROWS)  # fmt: skip
    return path


def small_pictures(setting: Setting, *, num_larger: int = 512) -> Path:
    """Make pictures of `SMALL_SIDE` from a seed, 64 out of each larger one: as `photos`."""
    num_larger, a_side = 1 if setting.tiny else num_larger, IMAGE_SIDE // SMALL_SIDE
    path = setting.work / f"small-{num_larger}.parquet"
    if not path.exists():
        spec = SampleSet(name="larger", num_samples=num_larger, sample_bytes=0)
        make_set(spec, path.with_suffix(""))
        made, pictures = open_set(path.with_suffix("")), []
        for number in range(num_larger):
            pixels = simplejpeg.decode_jpeg(made.sample(number), "RGB")
            # uint8[row, column, height, width, 3]
            parts = pixels.reshape(a_side, SMALL_SIDE, a_side, SMALL_SIDE, 3).swapaxes(1, 2)
            pictures += [
                simplejpeg.encode_jpeg(np.ascontiguousarray(part), quality=90)
                for part in parts.reshape(-1, SMALL_SIDE, SMALL_SIDE, 3)
            ]
        labels = np.arange(len(pictures)) % NUM_CLASSES
        _write(path, pictures, labels, num_rows=len(pictures))
    return path


def with_text(config: Config, setting: Setting, *, num_steps: int) -> Config:
    """Give a job a text of letters and blanks, made from a seed: an epoch of so many steps."""
    num_bytes = num_steps * config.data.batch_size * config.data.sequence_length + 1
    path = setting.work / f"text-{num_bytes}.txt"
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", np.uint8)
    path.write_bytes(np.random.default_rng(0).choice(letters, num_bytes).tobytes())
    return replace(config, data=replace(config.data, train=str(path)))


def _write(path: Path, pictures: list[bytes], labels: NDArray[np.int64], *, num_rows: int) -> None:
    chosen = np.arange(num_rows) % len(pictures)
    table = pa.table({
        "jpg": pa.array([pictures[number] for number in chosen], pa.binary()),
        "cls": pa.array(labels[chosen]),
    })  # fmt: skip
    partial = path.with_suffix(".partial")
    pq.write_table(table, partial, compression="none", row_group_size=256)
    partial.replace(path)
