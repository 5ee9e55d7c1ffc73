"""Row 1: do JPEGs reach the GPU as fast as it trains, and on how many cores?

Every way trains the same bare loop (bfloat16 by autocast, channels last, the trainer's optimizer),
an epoch by turns: over batches that lie on the card, over our loader with some threads, and over
DALI, which decodes on the CPU or on the card. The first steps of an epoch are not timed: nothing is
decoded yet. What a step lasts beyond the time in which the card is busy with a batch that lies
there is idle. Processor seconds for 1,000 images, beyond those of batches on the card, are as many
cores as 1,000 images/s need.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.jobs import REPEATS, WARM_UP, make_config, photos, small_pictures, take_turns
from benchmarks.gpu.row import Case, Goal, Setting, Ways
from benchmarks.studies.trainer_loop import Laps, bare_loop, busy_s, open_loader, ratio
from dataio.job.launch import join
from dataio.rows.samples import Batch
from tonari.trainer.config.config import Config

QUESTION = "JPEG to GPU: images/s, and the share of the time in which the card waits"

SKIPPED_STEPS = 4
THREADS, SMALL_THREADS = (8, 16), (1, 4, 8)
ON_CARD = "on the card"

Feed = Callable[[], Iterable[Batch]]
"""Makes the batches of an epoch."""


def cases(setting: Setting) -> Sequence[Case]:
    """List the models that are fed; beside DALI by cases of their own, as it may not be here."""
    most = THREADS[-1]
    waits = (Goal(f"tonari, {most} threads", "idle_fraction", most=0.02),)
    no_longer = tuple(Goal(f"tonari, {n} threads", "step_ratio", most=1.03) for n in SMALL_THREADS)
    is_there = find_spec("nvidia") and find_spec("nvidia.dali")
    lacks = "" if is_there else "nvidia-dali-cuda130 is not installed"
    photographed = partial(measure, setting, make_data=photos)
    small = partial(measure, setting, "resnet20", make_data=small_pictures, threads=SMALL_THREADS)
    return [
        Case("resnet50", partial(photographed, "resnet50", threads=THREADS), waits),
        Case(
            "resnet50 beside DALI on the card",
            partial(photographed, "resnet50", threads=(most,), decoder="mixed"), waits,
            lacks or ("" if setting.device == "cuda" else "DALI decodes there on a GPU alone"),
        ),
        Case("vit_b", partial(photographed, "vit_b", threads=THREADS), waits),
        Case("resnet20, 32 x 32", small, no_longer),
        Case(
            "resnet50 beside DALI on the CPU",
            partial(photographed, "resnet50", threads=(most,), decoder="cpu"), waits, lacks,
        ),
    ]  # fmt: skip


def measure(
    setting: Setting, model: str, *, make_data: Callable[[Setting], Path], threads: Sequence[int],
    decoder: str = "",
) -> Ways:  # fmt: skip
    """Train epochs over each feed by turns.

    Args:
        setting: Where.
        model: What is trained.
        make_data: Makes the file of pictures.
        threads: Of our loader, and of DALI.
        decoder: Of DALI, see `dali_feed`; empty: it is left out.
    """
    source, skipped = make_data(setting), 1 if setting.tiny else SKIPPED_STEPS
    config = make_config(model, setting, train=str(source))
    with join(device=setting.device) as job, ExitStack() as opened:
        laps, on_gpu = Laps(job.device), job.device.type == "cuda"
        train_over = bare_loop(config, job, channels_last=True)
        feeds: dict[str, Feed] = {}
        for number in threads:
            own = make_config(model, setting, f"data.workers.threads={number}", train=str(source))
            cache = setting.work / f"cache-{model}-{number}"
            loader = opened.enter_context(open_loader(own, job, cache))
            epochs = loader.epochs(WARM_UP + REPEATS + 1)
            feeds[f"tonari, {number} threads"] = partial(_loaded, epochs, loader)
            if decoder:
                feeds[f"DALI, {number} threads"] = dali_feed(
                    config, source, decoder=decoder, threads=number, on_gpu=on_gpu
                )
        kept = list(feeds[f"tonari, {threads[0]} threads"]())
        feeds[ON_CARD] = lambda: kept

        def turn(way: str) -> None:
            laps.note(way, train_over(_marked(feeds[way](), skipped, laps)) - skipped)

        turns = {way: partial(turn, way) for way in feeds}
        take_turns(turns, repeats=1 if setting.tiny else REPEATS)
        trains_s = statistics.median(laps.step_s[ON_CARD][WARM_UP:])
        if on_gpu:
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                num_steps = train_over(kept)
                torch.cuda.synchronize()
            trains_s = busy_s(profiled) / num_steps
    return figures(laps, trains_s=trains_s, rows=config.data.batch_size)


def figures(laps: Laps, *, trains_s: float, rows: int) -> Ways:
    """Sum up the laps; ``trains_s``: in which the card computes a step."""
    ways: Ways = {}
    for way in laps.step_s:
        step_s, cpu_s, least_s = (
            statistics.median(times[name][WARM_UP:])
            for times, name in ((laps.step_s, way), (laps.cpu_s, way), (laps.cpu_s, ON_CARD))
        )
        ways[way] = {
            "step_ms": 1e3 * step_s,
            "images_per_s": rows / step_s,
            "step_ratio": ratio(laps.step_s, way, ON_CARD),
            "idle_fraction": max(1 - trains_s / step_s, 0.0),
            "cpu_s_per_1000_images": max(cpu_s - least_s, 0.0) / rows * 1000,
        }
    return ways


def _loaded(epochs: Iterator[int], loader: Iterable[Batch]) -> Iterator[Batch]:
    next(epochs)
    yield from loader


def _marked(batches: Iterable[Batch], skipped: int, laps: Laps) -> Iterator[Batch]:
    """Begin the lap behind the first batches."""
    for number, batch in enumerate(batches):
        if number == skipped:
            laps.start()
        yield batch


def dali_feed(config: Config, source: Path, *, decoder: str, threads: int, on_gpu: bool) -> Feed:
    """Make an endless feed by the pipeline that `tonari bench loader` measures DALI by.

    Args:
        config: The settings.
        source: Photos as `photos` makes them.
        decoder: "cpu", or "mixed": the card decodes.
        threads: Of the pipeline.
        on_gpu: Whether it takes the pixels there.
    """
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    from tonari.bench.loader.peers.dali import Fed, recipe

    table = pq.read_table(source)
    encoded = [np.frombuffer(cell.as_buffer(), np.uint8) for cell in table["jpg"]]
    labels, size = table["cls"].to_numpy(), config.data.batch_size
    num_steps, rng = len(labels) // size, np.random.default_rng(0)

    def fed() -> Iterator[Fed]:
        while True:
            for rows in rng.permutation(len(labels)).reshape(num_steps, size):
                yield [encoded[row] for row in rows], list(labels[rows][:, None])

    stream = fed()

    def take() -> Fed:  # DALI looks into what it is given, and takes no partial
        return next(stream)

    pipeline = recipe(
        take, decoder, on_gpu=on_gpu, batch_size=size, num_threads=threads,
        prefetch_queue_depth=2, device_id=0 if on_gpu else None,
    )  # fmt: skip
    made = DALIGenericIterator([pipeline], ["image", "label"])

    def epoch() -> Iterator[Batch]:
        for (batch,) in islice(made, num_steps):
            label = batch["label"].flatten().to(batch["image"].device, non_blocking=True)
            yield {"image": batch["image"].permute(0, 3, 1, 2), "label": label}

    return epoch
