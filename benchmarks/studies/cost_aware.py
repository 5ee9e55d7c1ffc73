r"""Does hiding rows by what they cost train better in the same time, over slow links with a quota?

One rank of a job that trains a small network on pictures that lie behind a link, its cache's quota
a part of the pool, once for each line of a file of cells: a policy, seconds, a seed. A run ends
when its seconds are over, in mid-epoch too, and its learning rate falls with them: so all arms have
the same time, however busy the machine is meanwhile. Staging is not counted.

    python -m benchmarks.studies.cost_aware make --images cifar10-train.parquet --out shards
    mpiexec -n 2 python -m benchmarks.studies.cost_aware train --shards s3://shards/... \
        --test cifar10-test.parquet --cells cells.json --cache /scratch --out found.jsonl
    python -m benchmarks.studies.cost_aware show found.jsonl

`tests/lab/cost_aware.py` does all of it on the lab's nodes and links. A line of JSON a cell; cells
that the file of results has already are passed over.
"""

import argparse
import dataclasses
import io
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image as Picture
from torch import nn
from torch.nn.functional import cross_entropy

from dataio import Image, Int, Loader, NodeCache, Reports, Resize, Workers, discover_world
from dataio.source import write_index
from dataio.world import World
from importance import make_policy
from tonari.report.machine import describe_machine
from tonari.report.student import reach_of_mean

SIDE = 32
WARMUP = 0.1
MOST_EPOCHS = 10_000
SIDES, QUALITIES = (48, 97), (80, 96)
BYTES = (60_000, 300_000)
"""What a picture of the shards is made with: pixels a side, quality of the JPEG, and bytes of
comments in it, as cameras leave previews there. These stand for pixels that two cores, which a lab
of several nodes shares, could not decode as fast as a link brings them. All are drawn for each
picture, so that bytes have nothing to do with what it shows."""
SEGMENT = 65_000


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run.

    Attributes:
        arm: What it is called in tables.
        policy: One of `importance.policies`.
        settings: Of the policy.
        train_s: Of the run; the learning rate's schedule is as long.
        seed: Of the weights, the order and the draws.
        learning_rate: At its peak.
        batch_size: Of each rank.
        shards: Others than the job's, such as of fewer samples, all of which stay; "": the job's.
    """

    arm: str
    policy: str
    settings: Mapping[str, object] = field(default_factory=dict)
    train_s: float
    seed: int
    learning_rate: float = 3e-3
    batch_size: int = 32
    shards: str = ""

    @property
    def name(self) -> str:
        """Tell it from all others."""
        return json.dumps(dataclasses.asdict(self))


def make_shards(images: Path, out: Path, *, num_samples: int, num_shards: int) -> dict[str, float]:
    """Write pictures larger and noisier than they were, as JPEG of many sizes, in tar shards.

    Returns:
        Their bytes: mean, 10th and 90th percentile.
    """
    import tarfile

    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.Generator(np.random.Philox(key=11))
    table = pq.read_table(images)
    table = table.take(np.sort(rng.permutation(table.num_rows)[:num_samples]))
    # Samples of all classes in each shard, and on each node
    table = table.take(rng.permutation(num_samples))
    data, labels = (table.column(name).to_pylist() for name in ("jpg", "cls"))
    sizes = []
    for shard, numbers in enumerate(np.array_split(np.arange(num_samples), num_shards)):
        path = out / f"train-{shard:03d}.tar"
        with tarfile.open(path, "w") as tar:
            for number in numbers.tolist():
                made = _enlarged(data[number], rng)
                sizes.append(len(made))
                for ending, content in (("jpg", made), ("cls", b"%d" % labels[number])):
                    entry = tarfile.TarInfo(f"{number:06d}.{ending}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
        write_index(path)
    low, high = np.percentile(sizes, [10, 90])
    return {"mean_bytes": float(np.mean(sizes)), "p10_bytes": float(low), "p90_bytes": float(high)}


def _enlarged(data: bytes, rng: np.random.Generator) -> bytes:
    side, quality, left = (int(rng.integers(*each)) for each in (SIDES, QUALITIES, BYTES))
    picture = Picture.open(io.BytesIO(data)).convert("RGB")
    made = io.BytesIO()
    large = picture.resize((side, side), Picture.Resampling.BICUBIC)
    large.save(made, "JPEG", quality=quality)
    found = made.getvalue()
    comments = []
    while left > 0:
        text = rng.bytes(min(left, SEGMENT))
        comments.append(b"\xff\xfe" + (len(text) + 2).to_bytes(2, "big") + text)
        left -= len(text)
    # Behind the two bytes that every JPEG begins with
    return b"".join([found[:2], *comments, found[2:]])


def read_test(images: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the pictures to measure on as they are: uint8[n, 3, 32, 32], int64[n]."""
    table = pq.read_table(images)
    data, labels = (table.column(name).to_pylist() for name in ("jpg", "cls"))
    pixels = [np.asarray(Picture.open(io.BytesIO(each)).convert("RGB")) for each in data]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2), torch.tensor(labels)


class SmallNet(nn.Module):
    """Three convolutions, 24 thousand weights: it computes little and sends little."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 64)
        layers: list[nn.Module] = []
        for narrow, wide in pairwise(widths):
            layers += [nn.Conv2d(narrow, wide, 3, stride=2, padding=1), nn.GroupNorm(4, wide)]
            layers += [nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, float32[batch, 10], of uint8[batch, 3, 32, 32]."""
        found: torch.Tensor = self.head(self.body(images.float() / 127.5 - 1).mean(dim=(2, 3)))
        return found


def rate_factor(progress: float) -> float:
    """Rise for a tenth of the run, then fall as a cosine does."""
    if progress < WARMUP:
        return progress / WARMUP
    part = (progress - WARMUP) / (1 - WARMUP)
    return float(0.5 + 0.5 * np.cos(np.pi * part))


def average(model: nn.Module, world: World, *, elapsed_s: float) -> float:
    """Average the gradients over all ranks. Collective.

    Returns:
        What rank 0 gave as ``elapsed_s``.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    mine = torch.tensor([elapsed_s if world.rank == 0 else 0.0])
    flat = torch.cat([each.reshape(-1) for each in [*gradients, mine]]).numpy()
    whole = world.allreduce(flat, op="sum", doing="average gradients")
    shared_s, whole = float(whole[-1]), whole[:-1] / world.world_size
    sizes = [each.numel() for each in gradients]
    parts = torch.split(torch.from_numpy(whole), sizes)
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    return shared_s


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a job trains.

    Attributes:
        shards: The source.
        cache: The node's directory.
        quota_bytes: Of each node.
        threads: That decode, of each rank.
    """

    shards: str
    cache: Path
    quota_bytes: int
    threads: int = 1


def train(
    cell: Cell, place: Place, world: World, test: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, object]:
    """Train one cell, and measure it. Collective."""
    torch.manual_seed(cell.seed)
    model = SmallNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cell.learning_rate, weight_decay=0.01)
    policy = make_policy(cell.policy, **dict(cell.settings))
    with Loader(
        cell.shards or place.shards, batch_size=cell.batch_size, world=world, seed=cell.seed,
        importance=policy,
        fields={"image": Image("jpg", resize=Resize(SIDE), flip=0.5), "label": Int("cls")},
        cache=NodeCache(place.cache, quota=place.quota_bytes),
        workers=Workers(threads=place.threads), reports=Reports(progress=False),
    ) as loader:  # fmt: skip
        staging_s = loader.stats()["staging_s"]
        world.barrier(doing="begin to train")
        ends, figures, source = [time.perf_counter()], [], [loader.stats()["source_bytes"]]
        num_rows, steps = 0, 0
        elapsed_s = 0.0
        for _ in loader.epochs(MOST_EPOCHS):
            for batch in loader:
                factor = rate_factor(elapsed_s / cell.train_s)
                optimizer.param_groups[0]["lr"] = cell.learning_rate * factor
                loss = cross_entropy(model(batch["image"]), batch["label"], reduction="none")
                optimizer.zero_grad()
                (loss * batch["weight"]).mean().backward()  # type: ignore[no-untyped-call]
                elapsed_s = average(model, world, elapsed_s=time.perf_counter() - ends[0])
                optimizer.step()
                loader.report(batch, loss.detach())
                num_rows += int((batch["slot"] >= 0).sum())
                steps += 1
                if elapsed_s >= cell.train_s:
                    break
            stats = loader.stats()
            ends.append(time.perf_counter())
            source.append(stats["source_bytes"])
            figures.append(stats)
            if elapsed_s >= cell.train_s:
                break
        stats = figures[-1]
        len_of_last = max(len(loader), 1)
        counted = np.array([num_rows, source[-1] - source[0]], np.int64)
        rows, source_bytes = world.allreduce(counted, op="sum", doing="add up").tolist()
    found: dict[str, object] = {
        "question": "cost_aware",
        "arm": cell.arm, "policy": cell.policy, "settings": dict(cell.settings),
        "asked_s": cell.train_s, "seed": cell.seed, "learning_rate": cell.learning_rate,
        "batch_size": cell.batch_size, "shards": cell.shards,
        "cell": cell.name, "epochs": len(figures) - 1 + stats["step"] / len_of_last,
        "accuracy": measure(model, *test) if world.rank == 0 else 0.0,
        "train_s": ends[-1] - ends[0],
        "epoch_s": [round(b - a, 3) for a, b in pairwise(ends)],
        "epoch_source_bytes": [int(b - a) for a, b in pairwise(source)],
        "rows": rows, "steps": steps, "source_bytes": source_bytes, "staging_s": staging_s,
        "resident_fraction": stats["resident_fraction"], "wait_s": stats["wait_s"],
        "window_wait_s": stats["window_wait_s"], "world_size": world.world_size,
        "quota_bytes": place.quota_bytes,
    }  # fmt: skip
    for name in ("source_s_per_mb", "batch_s_per_mb", "step_s_per_row", "exposed_fraction"):
        found[name] = [each.get(name) for each in figures]
    return found


def measure(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Find the share of pictures that a model has right."""
    with torch.no_grad():
        right = [
            int((model(part).argmax(dim=1) == label).sum())
            for part, label in zip(torch.split(images, 500), torch.split(labels, 500), strict=True)
        ]
    return sum(right) / len(labels)


def run_cells(
    cells: Sequence[Cell], place: Place, out: Path, test: Path, *, done: frozenset[str]
) -> None:
    """Train cells one after the other; rank 0 adds a line of JSON for each. Collective."""
    torch.set_num_threads(1)
    with discover_world(timeout_s=300) as world:
        images = read_test(test) if world.rank == 0 else (torch.empty(0), torch.empty(0))
        for cell in cells:
            if cell.name in done:
                continue
            found = train(cell, place, world, images)
            if world.rank == 0:
                line = {**found, **describe_machine(place.cache)}
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")


def read_lines(path: Path) -> list[dict[str, object]]:
    """Read what was found so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tables(lines: Sequence[Mapping[str, object]], *, baselines: Sequence[str]) -> Iterator[str]:
    """Write medians of each arm, and the differences to others over the same seeds."""
    arms: dict[str, dict[int, Mapping[str, object]]] = {}
    for line in lines:
        arms.setdefault(str(line["arm"]), {})[int(str(line["seed"]))] = line
    yield "| arm | seeds | epochs | accuracy [least, most] | time s [least, most] | rows | MB |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for arm, runs in arms.items():
        epochs = statistics.median(float(str(run["epochs"])) for run in runs.values())
        row = [arm, str(len(runs)), f"{epochs:.1f}"]
        for name, scale, digits in (("accuracy", 100, 1), ("train_s", 1, 1)):
            values = [scale * float(str(run[name])) for run in runs.values()]
            middle, *ends = (f(values) for f in (statistics.median, min, max))
            row.append(f"{middle:.{digits}f} [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]")
        for name, scale in (("rows", 1), ("source_bytes", 10**6)):
            values = [float(str(run[name])) / scale for run in runs.values()]
            row.append(f"{statistics.median(values):,.0f}")
        yield "| " + " | ".join(row) + " |"
    yield ""
    yield "| arm | above | seeds | difference of means, points, 95 % | seeds above |"
    yield "|---|---|---:|---:|---:|"
    for arm, baseline in ((a, b) for b in baselines if b in arms for a in arms):
        if arm in baselines[: baselines.index(baseline) + 1]:
            continue
        seeds = sorted(arms[arm].keys() & arms[baseline].keys())
        gains = [
            100 * (float(str(arms[arm][s]["accuracy"])) - float(str(arms[baseline][s]["accuracy"])))
            for s in seeds
        ]
        reach = reach_of_mean(gains)
        spread = "" if reach is None else f" ± {reach:.2f}"
        mean = statistics.mean(gains) if gains else float("nan")
        won = sum(gain > 0 for gain in gains)
        yield f"| {arm} | {baseline} | {len(seeds)} | {mean:+.2f}{spread} | {won} |"


def main() -> None:
    """Make shards, train cells, or show what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make")
    make.add_argument("--images", type=Path, required=True)
    make.add_argument("--out", type=Path, required=True)
    make.add_argument("--samples", type=int, default=2000)
    make.add_argument("--shards", type=int, default=8)
    cells = commands.add_parser("train")
    cells.add_argument("--shards", required=True)
    cells.add_argument("--test", type=Path, required=True)
    cells.add_argument("--cells", type=Path, required=True)
    cells.add_argument("--cache", type=Path, required=True)
    cells.add_argument("--quota-bytes", type=int, required=True)
    cells.add_argument("--threads", type=int, default=1)
    cells.add_argument("--out", type=Path, required=True)
    show = commands.add_parser("show")
    show.add_argument("found", type=Path, nargs="+")
    show.add_argument("--above", nargs="+", default=["all rows", "random", "cost-blind"])
    args = parser.parse_args()
    if args.command == "make":
        found = make_shards(args.images, args.out, num_samples=args.samples, num_shards=args.shards)
        print(json.dumps(found))
    elif args.command == "train":
        asked = [Cell(**cell) for cell in json.loads(args.cells.read_text())]
        place = Place(
            shards=args.shards, cache=args.cache, quota_bytes=args.quota_bytes,
            threads=args.threads,
        )  # fmt: skip
        done = frozenset(str(line["cell"]) for line in read_lines(args.out))
        run_cells(asked, place, args.out, args.test, done=done)
    else:
        sys.stdout.writelines(
            line + "\n"
            for line in tables(
                [line for path in args.found for line in read_lines(path)], baselines=args.above
            )
        )


if __name__ == "__main__":
    main()
