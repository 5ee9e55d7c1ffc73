r"""What does a whole run of the trainer cost beside a bare torch loop, in one process?

``trainer`` is `tonari.trainer.run.loop.train` as `tonari train` calls it: turns between epochs,
losses back to the loader, metrics, progress, order hash, and checkpoints where
``run.checkpoint_epochs`` asks for them. ``bare`` is forward, mean loss, backward, optimizer over a
`dataio.Loader` of its own with the same settings; ``memory`` is that over batches that are in
memory, on the device. The optimizer is the trainer's. Data are real: JPEG of CIFAR-10 (Parquet with
``jpg`` and ``cls``), or a text. The ways take turns, an epoch each, so that what else the machine
does hits all of them. Ratios are of the trainer to another way, within a turn, then their median;
the first two turns warm up. ``issuing_ratio`` is of the processor time of the thread that trains,
which the loader's threads have no part in: with ``--tiny`` models that is nearly all Python, which
a fast GPU would wait for.

On a GPU, `torch.profiler` tells how long the kernels of the trainer's second epoch keep it busy
(that does not depend on the profiler, which slows down what launches them); over the time of an
epoch without it, the rest is idle. In bfloat16 the bare loops use autocast.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.trainer_loop --images cifar10-train.parquet \
        --text tinyshakespeare.txt [--models resnet vit gpt] [--tiny] [--device cuda]
        [SECTION.KEY=VALUE ...]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

import dataio
from dataio.job.launch import Job, join
from dataio.rows.samples import Batch
from tonari.report.machine import describe_machine
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.mesh.half import Half
from tonari.trainer.models import seeded
from tonari.trainer.run.build import make_model
from tonari.trainer.run.data import text_sources, token_field
from tonari.trainer.run.images import image_fields
from tonari.trainer.run.loop import train
from tonari.trainer.run.optimizers import build_optimizer
from tonari.trainer.run.tasks import Classify, NextToken, Task
from tonari.trainer.watch.metrics import Line

MODELS = {
    "resnet": 'kind = "resnet"\nnum_classes = 10\ndepth = 20',
    "resnet50": 'kind = "resnet50"\nnum_classes = 100',
    "vit": 'kind = "vit"\nnum_classes = 10\npatch = 4\nwidth = 128\ndepth = 4\nheads = 4',
    "gpt": 'kind = "gpt"\nwidth = 192\ndepth = 4\nheads = 6',
}
TINY = {
    "resnet": ["model.depth=8"],
    "vit": ["model.width=16", "model.depth=2", "model.heads=2"],
    "gpt": ["model.width=16", "model.depth=2", "model.heads=2"],
}
WARM_UP = 2
"""Turns that do not count."""

Epoch = Callable[[], int]


class Laps:
    """Takes the times of ways that have turns; the device is waited for at both ends of a lap.

    Attributes:
        step_s: Seconds of a step, by way, a figure a lap.
        cpu_s: Seconds of all processors.
        issuing_s: Of the thread that takes the times.
    """

    def __init__(self, device: torch.device) -> None:
        self.step_s: defaultdict[str, list[float]] = defaultdict(list)
        self.cpu_s: defaultdict[str, list[float]] = defaultdict(list)
        self.issuing_s: defaultdict[str, list[float]] = defaultdict(list)
        self._device = device
        self.start()

    def start(self) -> None:
        """Begin a lap."""
        self._wait()
        self._started, self._began = time.perf_counter(), time.process_time()
        self._issued_from = time.thread_time()

    def note(self, way: str, num_steps: int) -> None:
        """End a lap of so many steps."""
        self.issuing_s[way].append((time.thread_time() - self._issued_from) / num_steps)
        self._wait()
        self.step_s[way].append((time.perf_counter() - self._started) / num_steps)
        self.cpu_s[way].append((time.process_time() - self._began) / num_steps)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def ratio(times: Mapping[str, Sequence[float]], way: str, to: str) -> float:
    """Compare two ways within each turn, and take the median of those that count."""
    pairs = list(zip(times[way], times[to], strict=True))[WARM_UP:]
    return statistics.median(own / other for own, other in pairs)


class Turns:
    """Lets every way train an epoch after each of the trainer's, and takes the times.

    Args:
        others: Train an epoch, and count its steps.
        device: Where all compute.
    """

    def __init__(self, others: dict[str, Epoch], device: torch.device) -> None:
        self.busy_s = 0.0
        self._profile: profile | None = None
        self._others, self._device = others, device
        self._done = 0
        self.laps = Laps(device)

    def __call__(self, line: Line) -> None:
        """Note the trainer's epoch, then train one of each other way."""
        done = int(line["step"] or 0)
        num_steps = done - self._done
        self.laps.note("trainer", num_steps)
        self._done = done
        if self._profile is not None:
            self._profile.stop()
            self.busy_s = busy_s(self._profile) / num_steps
            self._profile = None
        for way, epoch in self._others.items():
            self.laps.start()
            self.laps.note(way, epoch())
        if self._device.type == "cuda" and len(self.laps.step_s["trainer"]) == 1:
            torch.cuda.synchronize(self._device)
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()
        self.laps.start()


def bare_loop(
    config: Config, job: Job, *, copies: bool = False, channels_last: bool = False
) -> Callable[[Iterable[Batch]], int]:
    """Make what trains over batches as a loop of one's own would, and counts them.

    Args:
        config: The settings.
        job: Where.
        copies: Whether bfloat16 is by the trainer's copies of the parameters, not by autocast.
        channels_last: Whether the weights lie so.
    """
    task: Task = NextToken() if config.data.kind == "text" else Classify()
    model = seeded(lambda: make_model(config), seed=config.run.seed).to(job.device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    half = config.mesh.dtype == "bfloat16"
    if copies:
        Half(model)
    optimizer = build_optimizer(config.optimizer, model.parameters())
    if config.mesh.compile:
        model.compile()

    def train_over(batches: Iterable[Batch]) -> int:
        num_steps = 0
        for batch in batches:
            with torch.autocast(job.device.type, torch.bfloat16, enabled=half and not copies):
                logits, target = model(task.input(batch)), task.target(batch)
                loss = F.cross_entropy(logits.flatten(0, -2), target.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            num_steps += 1
        return num_steps

    return train_over


def open_loader(config: Config, job: Job, cache: Path) -> dataio.Loader:
    """Open the data as the trainer does, in another cache."""
    data = config.data
    source: dataio.Source | list[str] = [str(data.train)]
    fields = image_fields(data, config.augment, training=True)
    if data.kind == "text":
        length = data.sequence_length
        source, _ = text_sources([str(data.train)], [], sequence_length=length, test_fraction=0.0)
        fields = {"tokens": token_field(length)}
    return dataio.Loader(
        source, batch_size=data.batch_size, fields=fields, cache=str(cache), device=job.device,
        shuffle=config.shuffle.make(), seed=config.run.seed, world=job.world,
        workers=data.workers,
    )  # fmt: skip


def measure(config: Config, job: Job, directory: Path) -> dict[str, object]:
    """Run all ways in turns."""
    with open_loader(config, job, directory / "bare") as loader:
        epochs = loader.epochs(2 * config.run.epochs + 1)
        next(epochs)
        kept = list(loader)

        def loaded() -> Iterator[Batch]:
            next(epochs)
            yield from loader

        bare = bare_loop(config, job)
        others: dict[str, Epoch] = {
            "bare": lambda: bare(loaded()),
            "memory": lambda: bare(kept),
        }
        if config.mesh.dtype == "bfloat16" and not config.mesh.compile:
            same = bare_loop(config, job, copies=True)
            others["copies"] = lambda: same(loaded())
        turns = Turns(others, job.device)
        ended = train(config, resume="never", on_epoch=turns, quiet=True)
    if not ended.finished:
        raise SystemExit(f"stopped by {ended.stopped_by} after {ended.progress.epochs} turns")
    step_s = statistics.median(turns.laps.step_s["trainer"][WARM_UP:])
    figures: dict[str, object] = {
        "question": "cost of a run of the trainer",
        "model": config.model.kind,
        "settings": config.model.settings | {"dtype": config.mesh.dtype},
        "batch_size": config.data.batch_size,
        "threads": config.data.workers.threads,
        "compile": config.mesh.compile,
        "steps": len(kept),
        "repeats": config.run.epochs - WARM_UP,
        "checkpoint_epochs": config.run.checkpoint_epochs,
    }
    for way, times in turns.laps.step_s.items():
        median_s = statistics.median(times[WARM_UP:])
        figures[f"{way}_step_ms"] = 1e3 * median_s
        figures[f"{way}_issuing_ms"] = 1e3 * statistics.median(turns.laps.issuing_s[way][WARM_UP:])
        figures[f"{way}_samples_per_s"] = config.data.batch_size / median_s
    for way in others:
        figures[f"wall_ratio_to_{way}"] = ratio(turns.laps.step_s, "trainer", way)
        figures[f"cpu_ratio_to_{way}"] = ratio(turns.laps.cpu_s, "trainer", way)
        figures[f"issuing_ratio_to_{way}"] = ratio(turns.laps.issuing_s, "trainer", way)
    if job.device.type == "cuda":
        figures["device"] = torch.cuda.get_device_name(job.device)
        figures["gpu_idle_fraction"] = 1 - turns.busy_s / step_s
    return figures


def busy_s(profiled: profile) -> float:
    """Sum the time in which anything ran on the GPU."""
    return (
        covered_us(
            (event.time_range.start, event.time_range.end)
            for event in profiled.events() or ()  # type: ignore[no-untyped-call]
            if event.device_type == DeviceType.CUDA
        )
        / 1e6
    )


def covered_us(spans: Iterable[tuple[float, float]]) -> float:
    """Measure the union of spans of time."""
    covered, until = 0.0, float("-inf")
    for start, stop in sorted(spans):
        covered += max(stop - max(start, until), 0.0)
        until = max(until, stop)
    return covered


def write_data(kind: str, args: argparse.Namespace, directory: Path) -> Path:
    """Take the first rows of the data, the text over again where it is too short."""
    num_rows = args.rows
    if kind == "gpt":
        path, text = directory / "text.txt", args.text.read_bytes()
        num_bytes = num_rows * args.length + 1
        path.write_bytes((text * -(-num_bytes // len(text)))[:num_bytes])
        return path
    source = args.images
    path = directory / "images.parquet"
    if not path.exists():
        pq.write_table(pq.read_table(source).slice(0, num_rows), path)
    return path


def make_config(kind: str, args: argparse.Namespace, directory: Path) -> Config:
    """Write the settings, and read them as `tonari train` does."""
    own = directory / kind
    own.mkdir()
    data = write_data(kind, args, directory)
    is_text = f'kind = "text"\nsequence_length = {args.length}' if kind == "gpt" else ""
    (own / "run.toml").write_text(
        f'[data]\ntrain = "{data}"\ncache = "{own / "cache"}"\nbatch_size = 16\n{is_text}\n'
        f"[model]\n{MODELS[kind]}\n[optimizer]\nlr = 0.01\n"
        f'[run]\nepochs = {args.repeats + WARM_UP}\ndirectory = "{own / "run"}"\nlog_steps = 10\n'
        f'device = "{args.device}"\ncheckpoint_epochs = 0\n'
    )
    tiny = ["data.batch_size=2", "run.log_steps=50", *TINY[kind]] if args.tiny else []
    return load_config(own / "run.toml", [*tiny, *args.overrides])


def main() -> None:
    """Print one line of JSON a model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--images", type=Path, default=Path("data/cifar10-train.parquet"))
    parser.add_argument("--text", type=Path, default=Path("data/tinyshakespeare.txt"))
    parser.add_argument("--rows", type=int, default=640)
    parser.add_argument("--length", type=int, default=64, help="of a row of text, in tokens")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="models of nearly no work")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as scratch, join(device=args.device) as job:
        for kind in args.models:
            data = args.text if kind == "gpt" else args.images
            if not data.exists():
                print(json.dumps({"model": kind, "skipped": f"{data} is not there"}), flush=True)
                continue
            config = make_config(kind, args, Path(scratch))
            figures = measure(config, job, Path(scratch) / kind)
            print(json.dumps(figures | describe_machine(data.parent)), flush=True)


if __name__ == "__main__":
    main()
