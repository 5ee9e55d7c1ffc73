"""What does leaving samples out cost: selection, thresholds over all pools, and feedback?

Selection: seconds that each policy takes over the rows of one rank, places included. Threshold: how
far the rows that several pools choose together are from those that sorting all scores would choose,
and how much they send to each other. Feedback: an epoch's time a step with outcome and report, over
that of the same steps without them. A step sleeps on a CPU, which leaves the processor to
others; on a GPU it is a chain of matrix products. All that is compared runs one after the other, in
every repeat.

`tonari bench importance` runs it.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

from dataio import Array, Int, Loader, Reports
from dataio.base.seeding import key
from dataio.plan.history import (
    EARLIER,
    Candidates,
    ScoreColumn,
    Scores,
    record,
    score_dtype,
    unscored,
)
from dataio.plan.policies import Importance
from dataio.world import World, run_threads, single_world, thread_worlds
from importance import make_policy, outcome, policies
from importance.threshold import key_bits, loss_keys, lowest, percentiles
from tonari.bench.generated import Generated
from tonari.bench.outputs import spread

BATCH = 256
NUM_CLASSES = 100
EPOCH, NUM_EPOCHS = 5, 90
FRACTION = 0.3
Figures = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class QuestionSettings:
    """What is measured, as flags of the command."""

    rows: int = 10_000_000
    """Rows to select among, of all pools together."""
    pools: int = 4
    """Pools that agree on a threshold."""
    repeats: int = 7
    """Of each selection; of an epoch, three times as many."""
    steps: int = 25
    """Of an epoch."""
    step_s: Annotated[float, tyro.conf.arg(name="step")] = 0.02
    """Seconds that a step lasts."""
    device: str = "cpu"
    """Where the steps run, such as cuda."""
    directory: Path = Path(tempfile.gettempdir())
    """For the cache; it is removed."""


def make_scores(num_rows: int, columns: tuple[ScoreColumn, ...]) -> Scores:
    """Make scores as of a model that has learned most rows."""
    rng = np.random.Generator(np.random.Philox(key=1))
    scores = unscored(num_rows, score_dtype(columns))
    loss = rng.exponential(1.5, num_rows).astype(np.float32)
    sure = np.exp(-loss)
    record(
        scores, np.arange(num_rows), loss=loss, correct=sure > 0.2, confidence=sure, epoch=EPOCH - 1
    )
    # Half of the rows had the same loss before
    for name in EARLIER[1:]:
        if name in (scores.dtype.names or ()):
            scores[name][::2] = scores["loss"][::2]
    return scores


def measure_selection(settings: QuestionSettings) -> Iterator[Figures]:
    """Time every policy's selection over the rows of one rank; that of Auto where it decides."""
    given = {"auto": {"begins": EPOCH, "second_guess": 1.0}}
    made = {name: make_policy(name, **given.get(name, {})) for name in policies()}
    scores = {name: make_scores(settings.rows, its.columns) for name, its in made.items()}
    ids, stream = np.arange(settings.rows), key(0, "importance", epoch=EPOCH)
    labels = (ids % NUM_CLASSES).astype(np.int32)
    elapsed: dict[str, list[float]] = {name: [] for name in made}
    busy: dict[str, list[float]] = {name: [] for name in made}
    hidden = {}
    for _ in range(settings.repeats):
        for name, policy in made.items():
            rows = Candidates(scores[name], ids, settings.rows, stream, by_field=lambda _: labels)
            started, cpu = time.perf_counter(), time.thread_time()
            selection = policy.select(rows, epoch=EPOCH, num_epochs=NUM_EPOCHS)
            elapsed[name].append(time.perf_counter() - started)
            busy[name].append(time.thread_time() - cpu)
            hidden[name] = len(selection.hidden)
    for name, times in elapsed.items():
        yield {
            "question": "selection",
            "policy": name,
            "rows": settings.rows,
            "repeats": settings.repeats,
            "hidden_fraction": hidden[name] / settings.rows,
            **_spread("select_s", times),
            **_spread("select_cpu_s", busy[name]),
        }


def measure_threshold(settings: QuestionSettings) -> Figures:
    """Compare what pools choose together with what sorting all their scores gives."""
    num_rows, stream = settings.rows, key(0, "importance", epoch=EPOCH)
    scores = make_scores(num_rows, ("loss",))
    held = np.random.Generator(np.random.Philox(key=2)).permutation(num_rows)
    count = int(FRACTION * num_rows)
    sent_bytes: list[int] = []

    def choose(world: World) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        def total(values: NDArray[np.int64]) -> NDArray[np.int64]:
            if world.rank == 0:
                sent_bytes.append(values.nbytes)
            return world.allreduce(values, op="sum", doing="agree")

        ids = held[world.rank :: settings.pools]
        rows = Candidates(scores[ids], ids, num_rows, stream, total)
        chosen = lowest(loss_keys(rows), count, total, num_bits=key_bits(rows))
        return ids[chosen], percentiles(rows, total)

    found = run_threads(thread_worlds([1] * settings.pools), choose)
    merged = loss_keys(Candidates(scores, np.arange(num_rows), num_rows, stream))
    chosen = np.zeros(num_rows, np.bool_)
    chosen[np.concatenate([ids for ids, _ in found])] = True
    right = merged <= np.partition(merged, count - 1)[count - 1]
    loss = scores["loss"]
    ordered = np.sort(loss)
    ends = [np.searchsorted(ordered, loss, side) for side in ("left", "right")]
    share = np.empty(num_rows)
    for rank, (_, part) in enumerate(found):
        share[held[rank :: settings.pools]] = part
    return {
        "question": "threshold",
        "rows": num_rows,
        "pools": settings.pools,
        "repeats": 1,
        "lowest_wrong_rows": int((chosen != right).sum()),
        "percentiles_error": float(np.abs(share - (ends[0] + ends[1]) / 2 / num_rows).max()),
        "lowest_totals": len(sent_bytes) - 1,
        "lowest_bytes": sum(sent_bytes[:-1]),
        "percentiles_totals": 1,
        "percentiles_bytes": sent_bytes[-1],
    }


Step = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def make_step(settings: QuestionSettings) -> tuple[Step, Callable[[], None]]:
    """Make a step that lasts as long and gives logits and losses; and a wait for its end."""
    device = torch.device(settings.device)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(BATCH, NUM_CLASSES, generator=generator).to(device)
    loss = torch.rand(BATCH, generator=generator).to(device)
    if device.type == "cpu":

        def asleep() -> tuple[torch.Tensor, torch.Tensor]:
            time.sleep(settings.step_s)
            return logits, loss

        return asleep, lambda: None
    left, right = (torch.randn(4096, 4096, device=device, dtype=torch.bfloat16) for _ in range(2))

    def multiply(num: int) -> float:
        started = time.perf_counter()
        for _ in range(num):
            torch.mm(left, right)
        torch.cuda.synchronize(device)
        return (time.perf_counter() - started) / num

    multiply(10)
    num = max(round(settings.step_s / multiply(200)), 1)

    def busy() -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(num):
            torch.mm(left, right)
        # As of a model: they are there when the products are.
        return logits + 0, loss + 0

    return busy, lambda: torch.cuda.synchronize(device)


def measure_feedback(settings: QuestionSettings) -> Figures:
    """Compare epochs that report with epochs under `Full` that do not."""
    repeats = 3 * settings.repeats  # short epochs: what else the machine does hits few of them
    step, wait = make_step(settings)
    arms = {
        "plain": make_policy("full"),
        "reported": make_policy("kakurenbo", drops=(), alphas=(1.0,)),
    }
    elapsed: dict[str, list[float]] = {name: [] for name in arms}
    report_s: list[float] = []
    with tempfile.TemporaryDirectory(dir=settings.directory) as place:
        loaders = {n: _open(settings, policy, Path(place) / n) for n, policy in arms.items()}
        epochs = {n: loader.epochs(repeats + 1) for n, loader in loaders.items()}
        for repeat in range(repeats + 1):
            # Each of them is first every second time.
            for name in list(arms) if repeat % 2 else list(arms)[::-1]:
                next(epochs[name])
                noted = report_s if name == "reported" else None
                elapsed[name].append(_epoch_s(loaders[name], step, wait, noted))
        for loader in loaders.values():
            loader.close()
    # Without the first, which warms up.
    plain, reported = (np.array(elapsed[name][1:]) for name in ("plain", "reported"))
    return {
        "question": "feedback",
        "device": settings.device,
        "batch_size": BATCH,
        "steps": settings.steps,
        "repeats": repeats,
        **_spread("ratio", (reported / plain).tolist()),
        **_spread("plain_step_ms", (1e3 * plain).tolist()),
        **_spread("reported_step_ms", (1e3 * reported).tolist()),
        "step_s": settings.step_s,
        **_spread("report_cpu_us", [1e6 * s for s in report_s[settings.steps :]]),
    }


def _open(settings: QuestionSettings, policy: Importance, directory: Path) -> Loader:
    return Loader(
        Generated("3KiB", settings.steps * BATCH, 3 << 10),
        batch_size=BATCH,
        fields={"x": Array("x", (32, 32, 3), "uint8"), "label": Int("label")},
        cache=directory,
        importance=policy,
        device=settings.device,
        world=single_world(),
        reports=Reports(progress=False),
    )


def _epoch_s(
    loader: Loader, step: Step, wait: Callable[[], None], report_s: list[float] | None
) -> float:
    """Measure the seconds a step of an epoch.

    With ``report_s``, losses are reported, and the processor seconds of each report go there.
    """
    num_steps, started = 0, time.perf_counter()
    for batch in loader:
        logits, loss = step()
        if report_s is not None:
            before = time.thread_time()
            loader.report(batch, loss, *outcome(logits, batch["label"]))
            report_s.append(time.thread_time() - before)
        num_steps += 1
    wait()
    return (time.perf_counter() - started) / num_steps


def _spread(name: str, values: list[float]) -> Figures:
    found = spread(values)
    return {name: found["median"], f"{name}_p10": found["p10"], f"{name}_p90": found["p90"]}


QUESTIONS: dict[str, Callable[[QuestionSettings], Iterator[Figures]]] = {
    "selection": measure_selection,
    "threshold": lambda settings: iter([measure_threshold(settings)]),
    "feedback": lambda settings: iter([measure_feedback(settings)]),
}
